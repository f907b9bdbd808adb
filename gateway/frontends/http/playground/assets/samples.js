// What lay between two looks at a model: rates and mean latencies, second by second.

const KEPT_SECS = 120;
const RECENT_SECS = 10;

export class Samples {
  constructor() {
    this.kept = [];
  }

  // Totals at a time in seconds. A total that has become less is that of another load.
  add(time, totals) {
    const last = this.kept.at(-1);
    if (last && totals.succeeded < last.succeeded) this.kept = [];
    this.kept.push({ ...totals, time });
    this.kept = this.kept.filter((each) => each.time >= time - KEPT_SECS);
  }

  // A point for each second: what `measure` makes of the totals before and after it.
  series(measure) {
    const pairs = this.kept.slice(1).map((after, index) => [this.kept[index], after]);
    return pairs.map(([before, after]) => ({ time: after.time, value: measure(before, after) }));
  }

  // The same over the last seconds; null before there are two looks.
  recent(measure) {
    const after = this.kept.at(-1);
    const before = this.kept.find((each) => each.time >= after?.time - RECENT_SECS);
    return !before || before === after ? null : measure(before, after);
  }
}

// How much of a total came in a second.
export function rate(...names) {
  const sum = (totals) => names.reduce((all, name) => all + (totals[name] ?? 0), 0);
  return (before, after) => (sum(after) - sum(before)) / (after.time - before.time);
}

// How much of a total came with each of another; null if none came.
export function mean(total, count) {
  return (before, after) => {
    const gained = after[count] - before[count];
    return gained > 0 ? (after[total] - before[total]) / gained : null;
  };
}
