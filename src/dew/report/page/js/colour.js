// Values -> colours. Blue and orange encode the sign (safe for colour-blind readers), depth the size; text stays readable.

const SIGNALS = {
  advantage: { label: 'Advantage', scale: 'signed', note: 'as used in training' },
  shaped: { label: 'Shaped reward r̃', scale: 'signed', note: 'the reward after weighting, before normalisation' },
  entropy: { label: 'Entropy', scale: 'amount', note: 'uncertainty of the policy, in nats' },
  value: { label: 'Predicted success', scale: 'amount', note: 'chance, before the token, to end above the mean of the group' },
  logp: { label: 'Log-probability', scale: 'loss', note: 'deeper = less likely' },
  ratio: { label: 'Ratio', scale: 'ratio', note: 'new policy / old policy; 1 = unchanged' },
  grpo: { label: 'GRPO', scale: 'signed', note: 'the advantage with GRPO' },
};

const colours = new Map();

/** A colour of the style sheet, for canvases; `colours` is cleared when the theme changes. */
function css(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
}

/** Red, green and blue of a hue, kept like `colours`. */
function rgb(hue) {
  const key = `rgb ${hue}`;
  if (!colours.has(key)) colours.set(key, [1, 3, 5].map((k) => parseInt(css(`--${hue}`).slice(k, k + 2), 16)));
  return colours.get(key);
}

const LIGHTEST = 12;
const MIDDLE = 55;

function quantile(sorted, q) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(q * (sorted.length - 1))))] : 0;
}

/** The range of sizes that depth spans: the middle 96 %, so that one outlier does not pale the rest. */
function rangeOf(values, stretched) {
  const sorted = values.map(Math.abs).sort((a, b) => a - b);
  return { low: stretched ? quantile(sorted, 0.02) : 0, high: quantile(sorted, 0.98), some: sorted.length > 0 };
}

function depth(size, { low, high }) {
  if (high - low < 1e-4 * Math.max(high, 1e-9)) return size === 0 && high === 0 ? 0 : MIDDLE;
  return LIGHTEST + (100 - LIGHTEST) * Math.min(1, Math.max(0, (size - low) / (high - low)));
}

/** A scale for one signal over the values of a group: value -> [hue, depth], and what its legend must say. */
function makeScale(kind, values, stretched = true) {
  const known = values.filter((v) => v !== null && v !== undefined);
  if (kind === 'amount' || kind === 'loss') {
    const range = rangeOf(known, false);
    const sign = kind === 'loss' ? -1 : 1;
    return {
      of: (v) => ['amount', depth(Math.abs(v), range)],
      legend: [{ hue: 'amount', from: 0, to: sign * range.high }],
    };
  }
  const centre = kind === 'ratio' ? Math.log : (v) => v;
  const back = kind === 'ratio' ? Math.exp : (v) => v;
  const placed = known.map(centre).filter(Number.isFinite);
  const plus = rangeOf(
    placed.filter((v) => v > 0),
    stretched && kind !== 'ratio',
  );
  const less = rangeOf(
    placed.filter((v) => v < 0),
    stretched && kind !== 'ratio',
  );
  const legend = [];
  if (less.some) legend.push({ hue: 'less', from: back(-less.high), to: back(-less.low) });
  if (plus.some) legend.push({ hue: 'plus', from: back(plus.low), to: back(plus.high) });
  return {
    of: (value) => {
      const v = centre(value);
      return v > 0 ? ['plus', depth(v, plus)] : v < 0 ? ['less', depth(-v, less)] : ['none', 0];
    },
    legend,
  };
}

/** Colours of three methods on one scale: a token's share of credit over the average of its side. */
function shareScale(tables, group) {
  const shares = tables.map((table) => {
    const averages = [true, false].map((correct) =>
      mean(
        table
          .filter((_, i) => group.answers[i].correct === correct)
          .flat()
          .filter((v) => v !== null)
          .map(Math.abs),
      ),
    );
    return (v, i) => Math.abs(v) / (averages[group.answers[i].correct ? 0 : 1] || 1) - 1;
  });
  const all = tables.flatMap((table, m) =>
    table.flatMap((row, i) => row.filter((v) => v !== null).map((v) => Math.abs(shares[m](v, i)))),
  );
  const reach = Math.max(
    quantile(
      all.sort((a, b) => a - b),
      0.98,
    ),
    0.01,
  );
  return {
    reach,
    share: (m, v, i) => shares[m](v, i),
    of: (m, v, i) =>
      v === 0
        ? ['none', 0]
        : [
            v > 0 ? 'plus' : 'less',
            LIGHTEST + (100 - LIGHTEST) * Math.min(1, Math.max(0, 0.5 + (0.5 * shares[m](v, i)) / reach)),
          ],
  };
}

function paint(element, [hue, deep]) {
  element.dataset.hue = hue;
  element.style.setProperty('--deep', `${deep.toFixed(1)}%`);
}

function legend(scale, note, flips) {
  const bars = scale.legend.map(({ hue, from, to }) =>
    h(
      'span',
      { class: 'legend-part' },
      h('span', {}, number(from)),
      h('span', { class: `ramp ramp-${hue}`, 'aria-hidden': 'true' }),
      h('span', {}, number(to)),
    ),
  );
  return h(
    'div',
    { class: 'legend', role: 'img', 'aria-label': `Colour scale. ${note}` },
    bars,
    quiet(note),
    flips && quiet(h('span', { class: 't flip' }, 'underlined'), ': flipped, credit of the wrong sign'),
  );
}
