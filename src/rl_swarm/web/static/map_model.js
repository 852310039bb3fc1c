// Holds what the map shows: the nodes, who learned from whom in the newest rounds, and the rounds of a replay.

export const PHASES = ["sampling", "scoring", "collecting", "training"]; // of a round, in their order
export const WORDS = [...PHASES, "waiting", "measuring", "finished", "offline"];
const MEAN_ROUNDS = 20; // of which a score is the mean, as in the leaderboard
const NICE = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000, 1e4, 1e6, 1e15];

const triples = (flat) => Array.from({ length: Math.floor(flat.length / 3) }, (_, k) => flat.slice(3 * k, 3 * k + 3));

export class Model {
  nodes = []; // {id, name, joined, wins, hasLog, score, phase, seconds}
  rounds = new Map(); // the newest ones: round -> learner -> [[author, groups], ...]
  round = 0;
  high = 0.1; // end of the scale of scores
  low = 0;
  frames = null; // of the replay: {round, scores, edges: [[learner, author, groups], ...]}
  stride = 1;

  // Takes the answer of api/map. Returns what is new: [learner, author, groups], and whether other nodes are shown.
  take(answer) {
    const { nodes: table } = answer;
    const changed = table.node.length !== this.nodes.length || table.node.some((id, k) => id !== this.nodes[k].id);
    if (changed && this.nodes.some((node, k) => node.id !== table.node[k])) { // the server has started again
      this.rounds.clear();
      this.frames = null;
    }
    this.nodes = table.node.map((id, k) => ({
      id, name: table.name[k], joined: table.joined[k] ?? Infinity, wins: table.wins[k], hasLog: table.has_log[k],
      score: table.score[k], phase: table.phase[k], seconds: table.seconds[k],
    }));
    this.nodes.forEach((node) => this.scale(node.score));
    this.round = answer.round;
    const fresh = [];
    for (const { round, edges } of answer.rounds) {
      if (!this.rounds.has(round)) this.rounds.set(round, new Map());
      const known = this.rounds.get(round), told = new Map();
      for (const [learner, author, groups] of triples(edges)) {
        if (learner === author || !this.nodes[author]) continue;
        if (!told.has(learner)) told.set(learner, []);
        told.get(learner).push([author, groups]);
        if (!known.has(learner)) fresh.push([learner, author, groups, round]);
      }
      for (const [learner, taken] of told) known.set(learner, taken);
    }
    const kept = [...this.rounds.keys()].sort((a, b) => b - a).slice(0, answer.recent_rounds);
    for (const round of this.rounds.keys()) if (!kept.includes(round)) this.rounds.delete(round);
    return { fresh, changed };
  }

  // Takes the answer of api/map/replay. A score is the mean of the last rounds, as it was then.
  takeReplay(answer) {
    const places = new Map(this.nodes.map((node, k) => [node.id, k]));
    const place = answer.nodes.map((id) => places.get(id));
    const window = Math.max(1, Math.round(MEAN_ROUNDS / answer.stride));
    this.stride = answer.stride;
    this.frames = answer.frames.map((frame) => ({
      round: frame.round,
      scores: new Array(this.nodes.length).fill(null),
      edges: triples(frame.edges).map(([learner, author, groups]) => [place[learner], place[author], groups])
        .filter(([learner, author]) => learner !== author && learner !== undefined && author !== undefined),
    }));
    answer.nodes.forEach((_, k) => {
      if (place[k] === undefined) return;
      let sum = 0, count = 0;
      answer.frames.forEach((frame, at) => {
        const [added, left] = [frame.scores[k], answer.frames[at - window]?.scores[k]];
        if (added !== null) [sum, count] = [sum + added, count + 1];
        if (left !== null && left !== undefined) [sum, count] = [sum - left, count - 1];
        if (!count) return;
        this.frames[at].scores[place[k]] = sum / count;
        this.scale(sum / count);
      });
    });
  }

  scale(score) {
    if (score === null) return;
    if (score > this.high + 1e-9) this.high = NICE.find((nice) => nice >= score) ?? score;
    if (score < this.low) this.low = -(NICE.find((nice) => nice >= -score) ?? -score);
  }

  // The edges of the newest rounds, or of a frame: [learner, author, groups].
  edges(frame = null) {
    if (frame !== null) return this.frames[frame]?.edges ?? [];
    const found = [];
    for (const round of this.rounds.values()) {
      for (const [learner, taken] of round) for (const [author, groups] of taken) found.push([learner, author, groups]);
    }
    return found;
  }

  get newest() {
    return this.rounds.size ? Math.max(...this.rounds.keys()) : 0;
  }

  get oldest() {
    return this.rounds.size ? Math.min(...this.rounds.keys()) : 0;
  }
}

// Sums edges by learner and author, as [learner, author, groups]: most groups first, of equal ones some of every node.
export function summed(edges) {
  const sums = new Map();
  for (const [learner, author, groups] of edges) {
    const key = learner * 1e6 + author;
    sums.set(key, (sums.get(key) ?? 0) + groups);
  }
  return [...sums].map(([key, groups]) => [Math.floor(key / 1e6), key % 1e6, groups])
    .sort((a, b) => b[2] - a[2] || spread(a[0], a[1]) - spread(b[0], b[1]));
}

// A number below 997 that looks drawn at random and is the same every time.
export const spread = (a, b) => (a * 7919 + b * 104729) % 997;

// Whom a node learned from, and whom it taught: two lists of [node, groups], most groups first.
export function neighbours(sums, node) {
  return {
    from: sums.filter(([learner]) => learner === node).map(([, author, groups]) => [author, groups]),
    to: sums.filter(([, author]) => author === node).map(([learner, , groups]) => [learner, groups]),
  };
}

// The phase of a node at a part (0 to 1) of its last round, by the seconds that each phase took.
export function phaseAt(seconds, part) {
  const total = seconds.reduce((sum, each) => sum + each, 0);
  let left = part * total;
  for (const [k, each] of seconds.entries()) {
    left -= each;
    if (left < 0) return PHASES[k];
  }
  return "waiting";
}
