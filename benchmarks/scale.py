"""What a peer-to-peer swarm costs, by its size.

    python benchmarks/scale.py real [--peers 4,16,50]
"""

import argparse
import json
import sys
import loopback, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["real","genrl"])
    parser.add_argument("--peers", default="4,16,50")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=float, default=20.0)
    parser.add_argument("--thread",action="store_true")
    args = parser.parse_args()
    if not loopback.in_a_namespace():
        print("no root", file=sys.stderr)
    for count in map(int, args.peers.split(",")):
        if args.what=="real":
          print(json.dumps(loopback.measure(count, args.processes, args.rounds, args.interval), indent=1))
        else:
          print(json.dumps(theirs.measure(count, args.processes, args.rounds, args.interval,args.thread), indent=1))

if __name__ == "__main__":
    main()
