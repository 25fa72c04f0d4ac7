// Values -> colours. Blue and orange encode the sign (safe for colour-blind readers), depth the size.

const SIGNALS = {
  relative: { label: 'Relative to GRPO', scale: 'relative', note: 'credit in units of GRPO’s; 1 or −1 = the same' },
  advantage: { label: 'Advantage', scale: 'signed', note: 'as used in training' },
  shaped: { label: 'Shaped reward r̃', scale: 'signed', note: 'the reward after weighting, before normalisation' },
  entropy: { label: 'Entropy', scale: 'amount', note: 'uncertainty of the policy, in nats' },
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

/** The size that has the full colour: not the largest, so that one outlier does not pale the rest. */
const reachOf = (values) => Float64Array.from(values, Math.abs).sort()[Math.round(0.98 * (values.length - 1))] ?? 0;

const depth = (size, reach) =>
  reach ? LIGHTEST + (100 - LIGHTEST) * Math.min(1, Math.max(0, size / reach)) : size ? MIDDLE : 0;

/** A scale for one signal over the values of a group: value -> [hue, depth], and what its legend must say. */
function makeScale(kind, values) {
  if (kind === 'amount' || kind === 'loss') {
    const reach = reachOf(known(values));
    const to = kind === 'loss' ? -reach : reach;
    return { of: (v) => ['amount', depth(Math.abs(v), reach)], legend: [{ hue: 'amount', from: 0, to }] };
  }
  if (kind === 'relative') {
    const reach = Math.max(reachOf(known(values).map((v) => Math.abs(v) - 1)), 0.02);
    const ends = [Math.max(0, 1 - reach), 1 + reach];
    const deep = (v) => v && depth(Math.abs(v) - ends[0], ends[1] - ends[0]);
    const of = (v) => [v > 0 ? 'plus' : v < 0 ? 'less' : 'none', deep(v)];
    return { of, legend: [{ hue: 'less', from: -ends[1], to: -ends[0] }, { hue: 'plus', from: ends[0], to: ends[1] }] };
  }
  const [centre, back] = kind === 'ratio' ? [Math.log, Math.exp] : [(v) => v, (v) => v];
  const placed = known(values).map(centre).filter(Number.isFinite);
  const least = kind === 'difference' ? 0.02 : 0; // so that rounding looks like none
  const reach = (side) => side.length && Math.max(least, reachOf(side));
  const [less, plus] = [reach(placed.filter((v) => v < 0)), reach(placed.filter((v) => v > 0))];
  const end = (hue, from, to) => ({ hue, from: back(from), to: back(to) });
  const legend = [less && end('less', -less, 0), plus && end('plus', 0, plus)].filter(Boolean);
  const of = (value) => {
    const v = centre(value);
    return v > 0 ? ['plus', depth(v, plus)] : v < 0 ? ['less', depth(-v, less)] : ['none', 0];
  };
  return { of, legend };
}

/** The class of a hue at a depth. One rule each: a style of its own per token makes a large group slow. */
const paintClass = ([hue, deep]) => (hue === 'none' ? '' : `${hue}-${Math.round(deep)}`);
const shades = new CSSStyleSheet();
for (const hue of ['plus', 'less', 'amount'])
  for (let deep = 0; deep <= 100; deep++)
    shades.insertRule(`.${hue}-${deep} { background-color: color-mix(in srgb, var(--${hue}) ${deep}%, transparent) }`);
document.adoptedStyleSheets = [shades];

function legend(scale, note, { flipped, sure, spread: uneven }) {
  const weighed = uneven || scale.signal === 'difference';
  return h('div.legend', { role: 'img', 'aria-label': `Colour scale. ${note}` },
    scale.legend.map(({ hue, from, to }) =>
      h('span.legend-part', short(from), h(`span.ramp.ramp-${hue}`, { 'aria-hidden': 'true' }), short(to)),
    ),
    quiet(note),
    flipped > 0 && quiet(h('span.t.flip', 'underlined'), ': flipped, credit of the wrong sign'),
    sure > 0 && quiet(h('span.t.sure', 'hatched'), `: entropy near zero${weighed ? ', weights are noise' : ''}`),
    !weighed && view.group.credited && quiet('Every token of an answer has the same credit, as with GRPO.'),
  );
}
