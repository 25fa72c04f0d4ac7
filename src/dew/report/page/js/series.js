// A chart's lines: metrics of all runs on one axis of steps, smoothed, and averaged over the seeds of an arm if asked.

const COLOURS = 8; // --run-0 … --run-7 in the style sheet
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [1, 5]];
const curvesState = { zoomed: false, plots: [], look: '' };

const isMerged = () => (state.seeds || (arms().some((arm) => arm.runs.length > 1) ? 'mean' : 'each')) === 'mean';
const hiddenRuns = () => new Set(state.hide.split('.').filter(Boolean).map(Number));

/** What has a line of its own: arms if their seeds are averaged, else runs. Each is a list of runs. */
const lineSets = () => (isMerged() ? arms().map((arm) => arm.runs) : view.report.runs.map((_, r) => [r]));
const setName = (members) =>
  isMerged() ? arms()[armOf(members[0])].label : view.report.runs[members[0]].name;

/** Mean over a window of points, twice; the window grows with their number, so it works for few and many. */
function smoothed(values, amount) {
  const at = values.map((_, i) => i).filter((i) => values[i] !== null);
  const wide = Math.floor(amount ** 2 * Math.max(4, 0.15 * at.length));
  if (!wide || at.length < 3) return values;
  let current = at.map((i) => values[i]);
  for (let pass = 0; pass < 2; pass++) {
    const sums = [0];
    for (const v of current) sums.push(sums[sums.length - 1] + v);
    current = current.map((_, k) => {
      const reach = Math.min(wide, k, current.length - 1 - k); // as far to the left as to the right
      return (sums[k + reach + 1] - sums[k - reach]) / (2 * reach + 1);
    });
  }
  const out = values.map(() => null);
  at.forEach((i, k) => {
    out[i] = current[k];
  });
  return out;
}

const smoothedOnce = new WeakMap();

/** The same for a logged metric, kept until another amount is asked for. */
function smoothedLog(values, amount) {
  if (smoothedOnce.get(values)?.amount !== amount) smoothedOnce.set(values, { amount, out: smoothed(values, amount) });
  return smoothedOnce.get(values).out;
}

const axes = new WeakMap();

/** The steps of all runs, each one's place, and the runs that have all of them; made once for all charts. */
function stepAxis(runs) {
  if (!axes.has(runs)) {
    const steps = [...new Set(runs.flatMap((run) => run.metrics.step || []))].sort((a, b) => a - b);
    const full = runs.filter(({ metrics: { step: own } }) => own?.length === steps.length && own.every((step, i) => step === steps[i]));
    axes.set(runs, [steps, new Map(steps.map((step, i) => [step, i])), new Set(full)]);
  }
  return axes.get(runs);
}

/** Mean and standard deviation of the rows at each step; null without a value. */
function meanAndSpread(rows, length) {
  const [means, spreads] = [Array(length).fill(null), Array(length).fill(null)];
  for (let i = 0; i < length; i++) {
    let [n, total, squares] = [0, 0, 0];
    for (const row of rows)
      if (row[i] !== null) {
        n += 1;
        total += row[i];
      }
    if (!n) continue;
    means[i] = total / n;
    for (const row of rows) if (row[i] !== null) squares += (row[i] - means[i]) ** 2;
    spreads[i] = Math.sqrt(squares / Math.max(1, n - 1));
  }
  return [means, spreads];
}

/** All lines of one chart on a common axis of steps: {label, colour, dash, raw, values (smoothed), low?, high?}. */
function linesOf(runs, names) {
  const hidden = hiddenRuns();
  const [steps, place, full] = stepAxis(runs);
  const aligned = (run, name) => {
    if (full.has(run)) return run.metrics[name];
    const out = Array(steps.length).fill(null);
    run.metrics[name].forEach((v, i) => {
      out[place.get(run.metrics.step[i])] = v;
    });
    return out;
  };
  const smooth = (values) => smoothedLog(values, Number(state.smooth));
  const found = [];
  for (const members of lineSets())
    names.forEach((name, d) => {
      const rows = members.filter((r) => runs[r].metrics[name] && !hidden.has(r)).map((r) => aligned(runs[r], name));
      if (!rows.length) return;
      const many = runs.length > 1;
      const line = {
        label: many ? `${setName(members)}${names.length > 1 ? ` · ${name.split('/').pop()}` : ''}` : name,
        colour: many ? colourOf(members[0]) : `--run-${d % COLOURS}`,
        dash: DASHES[d % DASHES.length],
        raw: rows[0],
      };
      if (rows.length > 1) {
        const [means, spreads] = meanAndSpread(rows, steps.length);
        const edge = (sign) => smooth(means.map((m, i) => (m === null ? null : m + sign * spreads[i])));
        Object.assign(line, { raw: means, low: edge(-1), high: edge(1) });
      }
      line.values = smooth(line.raw);
      found.push(line);
    });
  return [steps, found];
}
