// A chart's lines: metrics of all runs on one axis of steps, smoothed, and merged over seeds if asked.

const COLOURS = 8; // --run-0 … --run-7 in the style sheet
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [1, 5]];
const FEW_POINTS = 60; // too few to need smoothing
const curvesState = { smooth: 0.8, merge: false, zoomed: false, plots: [] };

const runMark = (r) => h('span', { class: 'run-mark', '--mark': `var(--run-${r % COLOURS})` }, String(r + 1));

/** Exponential average that starts unbiased; gaps stay gaps. */
function smoothed(values, keep) {
  if (!keep || values.filter((v) => v !== null).length < FEW_POINTS) return values;
  let average = 0;
  let weight = 0;
  return values.map((v) => {
    if (v === null) return null;
    average = keep * average + (1 - keep) * v;
    weight = keep * weight + (1 - keep);
    return average / weight;
  });
}

/** Runs that differ by their seed alone stand together. */
function seedSets(runs) {
  const sets = new Map();
  runs.forEach((run, r) => {
    const key = JSON.stringify([run.facts.algorithm, run.facts.model, run.facts.data, run.facts.algorithm ? '' : r]);
    if (!sets.has(key)) sets.set(key, []);
    sets.get(key).push(r);
  });
  return [...sets.values()];
}

/** All lines of one chart on a common axis of steps: {label, colour, dash, raw, values (smoothed), low?, high?}. */
function linesOf(runs, names) {
  const steps = [...new Set(runs.flatMap((run) => run.metrics.step || []))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const aligned = (run, name) => {
    const out = Array(steps.length).fill(null);
    (run.metrics[name] || []).forEach((v, i) => {
      out[place.get(run.metrics.step[i])] = v;
    });
    return out;
  };
  const sets = curvesState.merge ? seedSets(runs) : runs.map((_, r) => [r]);
  const found = [];
  sets.forEach((members, c) =>
    names.forEach((name, d) => {
      const rows = members.filter((r) => runs[r].metrics[name]).map((r) => aligned(runs[r], name));
      if (!rows.length) return;
      const many = runs.length > 1;
      const who = members.map((r) => r + 1).join(', ');
      const line = {
        label: many ? `${who} · ${name}` : name,
        colour: `--run-${(many ? c : d) % COLOURS}`,
        dash: DASHES[d % DASHES.length],
        raw: rows[0],
      };
      if (rows.length > 1) {
        const at = (i) => rows.map((row) => row[i]).filter((v) => v !== null);
        line.raw = steps.map((_, i) => (at(i).length ? mean(at(i)) : null));
        const wide = steps.map((_, i) => (at(i).length > 1 ? spread(at(i)) : 0));
        const edge = (sign) =>
          smoothed(
            line.raw.map((m, i) => (m === null ? null : m + sign * wide[i])),
            curvesState.smooth,
          );
        Object.assign(line, { low: edge(-1), high: edge(1) });
      }
      line.values = smoothed(line.raw, curvesState.smooth);
      found.push(line);
    }),
  );
  return [steps, found];
}
