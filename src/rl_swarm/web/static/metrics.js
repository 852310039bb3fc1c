// Names the metrics in plain words, with a line of explanation and what their numbers are.

import { WORDS } from "./words.js";

// kind: `reward` from 0 to 1, `share` shown in percent, or a plain number. unit: what a value is divided by.
const MIB = 2 ** 20;
const reward = (title, said) => ({ title, said, kind: "reward" });
const share = (title, said) => ({ title, said, kind: "share" });
const plain = (title, said, unit = 1) => ({ title, said, kind: "plain", unit });

const METRICS = {
  reward_local: reward("Reward while training", WORDS.Reward),
  held_out: share("Test score", WORDS["Test score"]),
  reward_training: reward("Reward of what it trained on", "Mean reward of all answers that were trained on, those of peers included. They were chosen, so this does not say what a model can do."),
  external_accepted: plain("Groups from peers", "Questions with all their answers that peers wrote and this node trained on, in a round."),
  tokens_per_second: plain("Tokens per second", "How fast answers are written. A token is a piece of a word."),
  zero_std_fraction: share("Groups without signal", "Share of the questions to which all answers got the same reward: nothing can be learned from them."),
  completion_length: plain("Length of answers, in tokens", "Mean length of an answer. A token is a piece of a word."),
  truncated_fraction: share("Answers cut off", "Share of the answers that reached the longest length allowed and were cut there."),
  entropy: plain("Entropy", "How undecided the model is between next tokens, in nats. Near 0 it always writes the same."),
  clip_fraction: share("Clipped tokens", "Share of the trained tokens whose update was limited, because the model had already changed much there."),
  logprob_mismatch: plain("Log-probability mismatch", "How far the probabilities of sampling and of training lie apart, in nats. It should stay near 0."),
  loss: plain("Loss", "The quantity that training lowers. In reinforcement learning it hovers near 0 and says little about progress."),
  kl: plain("Distance from the first model", "An estimate of the KL divergence in nats: how far the model has moved from where it began."),
  grad_norm: plain("Gradient norm", "The size of the update that training asks for, before it is limited."),
  trained_tokens: plain("Tokens trained on", "Tokens of answers that were trained on in a round, own ones and those of peers."),
  external_max_nll: plain("Least likely text from peers", "How improbable this model found the strangest passage from peers that it accepted, in nats."),
  peak_memory: plain("Peak memory, MiB", "The most memory that the node has used.", MIB),
  "load.processor": plain("Processor, cores in use", "Processor cores that the node kept busy."),
  "load.memory": plain("Memory, MiB", "Memory that the node uses.", MIB),
  "load.gpu": share("GPU load", "Share of the time in which the GPU was at work."),
  "load.gpu_memory": plain("GPU memory, MiB", "Memory in use on the GPU, by all programs.", MIB),
};

const upper = (text) => text.replace(/^./, (first) => first.toUpperCase());

export function metricInfo(metric) {
  if (Object.hasOwn(METRICS, metric)) return { unit: 1, ...METRICS[metric] };
  const [, part, rest] = /^(seconds|reward_local)\.(.+)$/.exec(metric) ?? [];
  if (part === "seconds") return { unit: 1, ...plain(`Seconds: ${rest}`, "") };
  if (part) return { unit: 1, ...reward(`Reward while training, ${stage(rest)}`, "") };
  return { unit: 1, ...plain(upper(metric.replaceAll("_", " ")), "") };
}

// Stages count from 1 where people read them.
export const stage = (name) => name.replace(/^stage_(\d+)$/, (_, number) => `stage ${Number(number) + 1}`);

export const inUnits = (values, unit) => (unit === 1 ? values : values.map((value) => (value === null ? null : value / unit)));
