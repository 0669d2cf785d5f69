// The node's terms in plain words.

import { line } from "./text.js";

const STATES = {
  STARTING: ["Starting", "own", "start"],
  RESUMING: ["Resuming", "own", "start"],
  TRAINING: ["Training", "good", "run"],
  WAITING: ["Waiting", "warn", "wait"],
  PAUSED: ["Paused", "warn", "pause"],
  IDLE: ["Idle", "quiet", "stop"],
  STOPPING: ["Stopping", "warn", "stop"],
  FAILED: ["Failed", "bad", "fail"],
};

// {word, tone, icon} of a state.
export function stateWords(state) {
  const [word, tone, icon] = STATES[state] ?? [line(state, 20), "quiet", "info"];
  return { word, tone, icon };
}

const STAGES = {
  start: "Starting",
  load: "Loading the model",
  engine: "Starting the sampler",
  "agreement check": "Checking that sampler and trainer agree",
  recover: "Catching up with the journal",
  rollout: "Answering tasks",
  mix: "Choosing groups from peers",
  teacher: "Asking the teacher",
  journal: "Writing down what is used",
  update: "Updating the model",
  weights: "Giving the sampler the new weights",
  checkpoint: "Saving a checkpoint",
  averaging: "Averaging weights with other nodes",
  evaluate: "Testing on held-out tasks",
  paused: "Paused",
};

export function stageWords(stage) {
  return Object.hasOwn(STAGES, stage) ? STAGES[stage] : line(stage, 40);
}

// Verdict -> [tone, what it means]. Reasons as in docs/protocol.md.
export const VERDICTS = {
  admitted: ["good", "Checked and scored here, and good to train on."],
  uninformative: ["quiet", "All answers got the same reward: nothing to learn from their differences. No fault of anybody."],
  stale: ["quiet", "Older than the swarm allows when it arrived."],
  replayed: ["quiet", "This node had the same group already."],
  from_future: ["warn", "Dated in the future: one of the two clocks is wrong."],
  over_budget: ["warn", "Its producer sent more than its share for the time."],
  unknown_environment: ["warn", "A task of an environment, or a version of it, that the swarm does not practise."],
  unsupported_version: ["warn", "Made by a version of Shoal that speaks another protocol."],
  wrong_swarm: ["warn", "It belongs to another swarm."],
  scorer_failed: ["warn", "Its answers could not be scored here in time."],
  unassigned_task: ["bad", "Its producer chose a task that was not its to do: choosing easy tasks is not allowed."],
  reward_mismatch: ["bad", "It claims rewards that scoring here does not find. Its producer loses reputation."],
  equivocation: ["bad", "Its producer made two different groups for the same task."],
  hash_mismatch: ["bad", "What arrived is not what was announced."],
  bad_signature: ["bad", "The signature is not its producer's."],
  wrong_producer: ["bad", "Somebody else's group under this producer's name."],
  malformed: ["bad", "It is not a valid group."],
  too_large: ["bad", "Larger than the swarm allows."],
  banned: ["bad", "Its producer is banned here for what it sent before."],
};

// {name, tone, meaning} of a verdict.
export function verdictWords(verdict) {
  const [tone, meaning] = Object.hasOwn(VERDICTS, verdict) ? VERDICTS[verdict] : ["bad", ""];
  return { name: line(verdict, 40).replaceAll("_", " "), tone, meaning };
}

// What Training shows: column of the series, title, digits, what it is, what would be worrying.
export const MEASURES = [
  ["unparsed", "Answers that cannot be read", 2, "Share of answers without a result in the form asked for.", "near 1: reward is 0 because of the form alone."],
  ["completion_tokens", "Length of answers", 0, "Mean tokens of an answer.", "running to the cap, or down to almost nothing."],
  ["entropy", "Entropy", 2, "How open the choice of the next token is.", "falling to 0: every answer becomes the same."],
  ["kl_behaviour", "KL to the sampling policy", 4, "How far training has moved from what sampled the answers.", "rising over about 0.1."],
  ["loss", "Loss", 3, "What the update lowers. With rewards its size says little.", "jumps that do not come back."],
  ["grad_norm", "Gradient norm", 2, "Size of the update's gradient before clipping.", "spikes, or growth over hundreds of steps."],
  ["clip_fraction", "Clipped tokens", 3, "Share of tokens whose update was cut off.", "over 0.2 for long: steps are too large."],
  ["ess", "Effective sample size", 2, "Share of the batch that carries the update; 1 is all of it.", "under 0.5: groups are too old or too foreign."],
  ["max_mismatch", "Mismatch", 3, "Largest gap between sampler and trainer log-probabilities.", "growing: the two no longer run the same model."],
  ["seconds", "Seconds a step", 1, "Time from one step to the next.", "growing without longer answers."],
  ["tokens_per_second", "Sampling speed", 0, "Tokens a second while answering.", "falling: something else uses the device."],
];
