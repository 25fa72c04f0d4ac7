// A chart's lines: metrics of all runs on one axis of steps, smoothed, and averaged over the seeds of an arm if asked.

const COLOURS = 8; // --run-0 … --run-7 in the style sheet
const SHAPE_OF = [0, 0, 0, 0, 1, 1, 2, 1]; // colours that look alike to the colour-blind differ in shape
const SHAPES = [
  null, // a round mark, and nothing on the line
  [[0, 0], [1, 0], [1, 1], [0, 1]],
  [[0.5, 0], [1, 1], [0, 1]],
  [[0.5, 0], [1, 0.5], [0.5, 1], [0, 0.5]],
]; // the corners of marks; each further round of colours has the next shapes
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [1, 5]];

const hasSeeds = () => arms().some((arm) => arm.runs.length > 1);
const isMerged = () => (state.seeds || (hasSeeds() ? 'mean' : 'each')) === 'mean';
const isStudy = () => view.report.runs[0].facts.arm && hasSeeds();
/** Whether curves are differences from the run of the baseline with the same seed: by default in a study's Curves. */
const isDifference = () =>
  viewName === 'curves' && arms().length > 1 && (state.as || (isStudy() ? 'differences' : 'values')) === 'differences';
const hiddenRuns = () => new Set(state.hide.split('.').filter(Boolean).map(Number));

/** What has a line of its own: arms if their seeds are averaged, else runs. Each is a list of runs. */
const lineSets = () => (isMerged() ? arms().map((arm) => arm.runs) : view.report.runs.map((_, r) => [r]));
const setName = (members) =>
  isMerged() ? shortName(arms()[armOf(members[0])]) : view.report.runs[members[0]].name;

/** Mean over a window of points, twice; the window grows with their number, so it works for few and many. */
function smoothed(values, amount) {
  const at = [...values.keys()].filter((i) => values[i] !== null);
  const wide = Math.floor(amount ** 2 * Math.max(4, 0.15 * at.length));
  if (!wide || at.length < 3) return values;
  const current = Float64Array.from(at, (i) => values[i]);
  const sums = new Float64Array(at.length + 1);
  for (let pass = 0; pass < 2; pass++) {
    for (let k = 0; k < at.length; k++) sums[k + 1] = sums[k] + current[k];
    for (let k = 0; k < at.length; k++) {
      const reach = Math.min(wide, k, at.length - 1 - k); // as far to the left as to the right
      current[k] = (sums[k + reach + 1] - sums[k - reach]) / (2 * reach + 1);
    }
  }
  const out = Array(values.length).fill(null);
  for (let k = 0; k < at.length; k++) out[at[k]] = current[k];
  return out;
}

/** Mean and standard deviation of the rows at each step; null without a value. */
function meanAndSpread(rows, length) {
  const at = Array.from({ length }, (_, i) => known(rows.map((row) => row[i])));
  return [mean, spread].map((of) => at.map((values) => (values.length ? of(values) : null)));
}

/** One line, and its band if it is a mean of several runs: {raw, values (smoothed), low?, high?}. */
function lineOf(rows, length, amount) {
  if (rows.length === 1) return { raw: rows[0], values: smoothed(rows[0], amount) };
  const [raw, spreads] = meanAndSpread(rows, length);
  const [values, wide] = [smoothed(raw, amount), smoothed(spreads, amount)];
  const edge = (sign) => values.map((v, i) => (v === null ? null : v + sign * wide[i]));
  return { raw, values, low: edge(-1), high: edge(1) };
}

/** All lines of one chart on a common axis of steps: those of `lineOf` with {label, members, colour, shape, dash}. */
function linesOf(runs, names) {
  const steps = (runs.steps ||= [...new Set(runs.flatMap((run) => run.metrics.step || []))].sort((a, b) => a - b));
  const place = new Map(steps.map((step, i) => [step, i]));
  const aligned = ({ metrics }, name) => {
    if (metrics.step.length === steps.length) return metrics[name];
    const out = Array(steps.length).fill(null);
    metrics[name].forEach((v, i) => (out[place.get(metrics.step[i])] = v));
    return out;
  };
  const seed = (r) => runs[r].facts.seed ?? NaN;
  const others = (r) => arms()[arms()[armOf(r)].baseline].runs;
  const twin = (r) => runs[isDifference() ? others(r).find((q) => seed(q) === seed(r)) : r];
  const relative = (r, name) => {
    const [row, base] = [runs[r], twin(r)].map((run) => aligned(run, name));
    return isDifference() ? row.map((v, i) => (v === null || base[i] === null ? null : v - base[i])) : row;
  };
  const line = (members, name, d) => {
    const shown = members.filter((r) => runs[r].metrics[name] && twin(r)?.metrics[name] && !hiddenRuns().has(r));
    if (!shown.length) return [];
    const values = lineOf(shown.map((r) => relative(r, name)), steps.length, Number(state.smooth));
    const dash = DASHES[d % DASHES.length];
    if (!manyRuns()) return [{ ...values, label: name, members, colour: `--run-${d % COLOURS}`, dash }];
    const label = `${setName(members)}${names.length > 1 ? ` · ${name.split('/').pop()}` : ''}`;
    return [{ ...values, label, members, colour: colourOf(members[0]), shape: shapeOf(members[0]), dash }];
  };
  return [steps, lineSets().flatMap((members) => names.flatMap((name, d) => line(members, name, d)))];
}
