// Smooths a curve: every point becomes the mean of the last rounds.

export const WINDOWS = [1, 5, 20, 100]; // rounds; 1 is none

// The mean over the last `rounds` rounds up to each point. A point may stand for several rounds; gaps stay gaps.
export function trailingMean(at, values, rounds) {
  if (rounds <= 1) return values;
  let sum = 0;
  let count = 0;
  let begin = 0;
  return values.map((value, k) => {
    if (value === null || value === undefined) return null;
    sum += value;
    count += 1;
    for (; at[begin] <= at[k] - rounds; begin += 1) {
      if (values[begin] === null || values[begin] === undefined) continue;
      sum -= values[begin];
      count -= 1;
    }
    return sum / count;
  });
}
