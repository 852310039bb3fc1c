import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():  # read when triton is imported, which transformers does on the way
    os.environ.setdefault("TRITON_INTERPRET", "1")
