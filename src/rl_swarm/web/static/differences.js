// Compares texts word by word.

const WORD = /[\p{L}\p{N}_]+|[^\p{L}\p{N}_\s]/gu;
const MAX_WORDS = 2000; // of one text
const SHORT = 12; // words
const MAX_CELLS = 250_000; // of the table of the longest common subsequence

const words = (text) => [...text.matchAll(WORD)].slice(0, MAX_WORDS).map((match) => ({ word: match[0], from: match.index, to: match.index + match[0].length }));

// Counts the words that two texts share, as often as both have them, less those that only one has.
function likeness(one, other) {
  const counts = new Map();
  for (const { word } of one) counts.set(word, (counts.get(word) ?? 0) + 1);
  let common = 0;
  for (const { word } of other) {
    const left = counts.get(word) ?? 0;
    if (left) {
      common += 1;
      counts.set(word, left - 1);
    }
  }
  return 2 * common - one.length - other.length;
}

// The text among `others` that is most like this one.
export function nearest(text, others) {
  const own = words(text);
  const scored = others.map((other) => [likeness(own, words(other)), other]);
  return scored.length ? scored.reduce((best, each) => (each[0] > best[0] ? each : best))[1] : null;
}

// Where `text` differs from `right`: ranges [from, to] of its words. A range without length is where words
// are missing; its third part is these words.
// Texts that are too long, or long and without a common word, give none.
export function differences(text, right) {
  const all = words(text);
  const others = words(right);
  let start = 0;
  while (start < Math.min(all.length, others.length) && all[start].word === others[start].word) start += 1;
  let end = 0;
  while (end < Math.min(all.length, others.length) - start && all[all.length - 1 - end].word === others[others.length - 1 - end].word) end += 1;
  const one = all.slice(start, all.length - end);
  const two = others.slice(start, others.length - end);
  const nothingCommon = !start && !end && likeness(one, two) === -one.length - two.length;
  if (one.length * two.length > MAX_CELLS || (nothingCommon && one.length > SHORT)) return [];
  const common = table(one, two);
  const gap = (i) => (i ? one[i - 1].to : start ? all[start - 1].to : 0);
  const same = (i, j) => i < one.length && j < two.length && one[i].word === two[j].word;
  const ranges = [];
  for (let [i, j] = [0, 0]; i < one.length || j < two.length; ) {
    if (same(i, j)) {
      i += 1;
      j += 1;
      continue;
    }
    const [first, other] = [i, j];
    while (!same(i, j) && (i < one.length || j < two.length)) {
      if (i < one.length && (j === two.length || common[i + 1][j] >= common[i][j + 1])) i += 1;
      else j += 1;
    }
    if (i > first) ranges.push([one[first].from, one[i - 1].to]);
    else ranges.push([gap(first), gap(first), right.slice(two[other].from, two[j - 1].to)]);
  }
  return ranges;
}

// The lengths of the longest common subsequences of what is left of both from every place on.
function table(one, two) {
  const rows = Array.from({ length: one.length + 1 }, () => new Uint16Array(two.length + 1));
  for (let i = one.length - 1; i >= 0; i--) {
    for (let j = two.length - 1; j >= 0; j--) rows[i][j] = one[i].word === two[j].word ? rows[i + 1][j + 1] + 1 : Math.max(rows[i + 1][j], rows[i][j + 1]);
  }
  return rows;
}
