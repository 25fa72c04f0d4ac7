// Where entropy and credit lie over all groups of the page: pictures, words and one number.

const WIDE = 420;
const HIGH = 170;

/** Two outlines over one axis: correct solid and blue, wrong dashed and orange. */
function histogram(title, data, note) {
  if (!data) return null;
  const top = Math.max(...data.correct, ...data.wrong, 1e-9);
  const x = (k) => 10 + ((WIDE - 20) * k) / data.correct.length;
  const y = (v) => HIGH - 22 - ((HIGH - 40) * v) / top;
  const outline = (shares) =>
    `M${x(0)},${y(0)}${shares.map((v, k) => `L${x(k)},${y(v)}L${x(k + 1)},${y(v)}`).join('')}L${x(shares.length)},${y(0)}`;
  const end = (v) => number(Number(v.toPrecision(3)));
  return h(
    'figure',
    { class: 'chart' },
    h('figcaption', {}, h('span', {}, h('strong', {}, title), ' ', h('span', { class: 'quiet' }, note))),
    s(
      'svg',
      {
        viewBox: `0 0 ${WIDE} ${HIGH}`,
        role: 'img',
        'aria-label': `${title}: mean ${number(data.mean_correct)} in correct answers, ${number(data.mean_wrong)} in wrong ones`,
      },
      s('path', { d: outline(data.correct), class: 'side-right' }),
      s('path', { d: outline(data.wrong), class: 'side-wrong' }),
      s('line', { x1: 10, x2: WIDE - 10, y1: y(0), y2: y(0), class: 'grid' }),
      s('text', { x: 10, y: HIGH - 6 }, end(data.low)),
      s('text', { x: WIDE - 10, y: HIGH - 6, 'text-anchor': 'end' }, end(data.high)),
    ),
    h(
      'div',
      { class: 'key' },
      h('span', { class: 'key-right' }, `✓ correct, mean ${number(data.mean_correct)}`),
      h('span', { class: 'key-wrong' }, `✗ wrong, mean ${number(data.mean_wrong)}`),
    ),
  );
}

function deciles(data) {
  if (!data) return null;
  const sides = ['correct', 'wrong'].filter((name) => data[name]);
  const top = Math.max(0.14, ...sides.flatMap((name) => data[name]));
  const y = (v) => HIGH - 22 - ((HIGH - 40) * v) / top;
  const wide = (WIDE - 20) / 10;
  const bars = sides.flatMap((name, k) =>
    data[name].map((v, d) =>
      s(
        'rect',
        {
          x: 10 + wide * d + 4 + (k * (wide - 8)) / sides.length,
          width: (wide - 8) / sides.length - 1,
          y: y(v),
          height: y(0) - y(v),
          class: name === 'correct' ? 'bar-right' : 'bar-wrong',
        },
        s('title', {}, `${name}, tenth ${d + 1}: ${percent(v, 1)}`),
      ),
    ),
  );
  return h(
    'figure',
    { class: 'chart' },
    h(
      'figcaption',
      {},
      h(
        'span',
        {},
        h('strong', {}, 'Share of |credit| by entropy'),
        ' ',
        h('span', { class: 'quiet' }, 'tokens in ten equal parts, by increasing entropy'),
      ),
    ),
    s(
      'svg',
      {
        viewBox: `0 0 ${WIDE} ${HIGH}`,
        role: 'img',
        'aria-label': sides.map((name) => `${name}: ${data[name].map((v) => percent(v, 1)).join(', ')}`).join('; '),
      },
      bars,
      s('line', { x1: 10, x2: WIDE - 10, y1: y(0.1), y2: y(0.1), class: 'even' }),
      s('line', { x1: 10, x2: WIDE - 10, y1: y(0), y2: y(0), class: 'grid' }),
      s('text', { x: 10, y: HIGH - 6 }, 'sure'),
      s('text', { x: WIDE - 10, y: HIGH - 6, 'text-anchor': 'end' }, 'unsure'),
    ),
    h(
      'div',
      { class: 'key' },
      sides.map((name) =>
        h(
          'span',
          { class: name === 'correct' ? 'key-right' : 'key-wrong' },
          `${name === 'correct' ? '✓ correct' : '✗ wrong'}: tenth with the highest entropy ${percent(data[name][9], 1)}`,
        ),
      ),
      h('span', { class: 'quiet' }, 'dotted: 10 % each, as GRPO gives'),
    ),
  );
}

function wordTable(title, note, words, kind) {
  const top = Math.max(...words.map((w) => Math.abs(w.extra)), 1e-9);
  return h(
    'div',
    { class: `chart words ${kind}` },
    h('h3', {}, title),
    h('p', { class: 'quiet' }, note),
    words.length
      ? h(
          'table',
          {},
          h(
            'thead',
            {},
            h(
              'tr',
              {},
              h('th', { scope: 'col' }, 'word'),
              h('th', { scope: 'col' }, 'uses'),
              h('th', { scope: 'col' }, 'relative to the mean'),
            ),
          ),
          h(
            'tbody',
            {},
            words.map((w) =>
              h(
                'tr',
                {},
                h('th', { scope: 'row' }, h('code', {}, brief(w.word))),
                h('td', {}, whole(w.uses)),
                h(
                  'td',
                  { class: 'extra', '--share': `${(100 * Math.abs(w.extra)) / top}%` },
                  `${w.extra > 0 ? '+' : ''}${percent(w.extra, 1)}`,
                ),
              ),
            ),
          ),
        )
      : h('p', { class: 'quiet' }, 'Too few words.'),
  );
}

function massCard(mass) {
  if (!mass) return null;
  const sides = ['correct', 'wrong'].filter((side) => mass[side] !== undefined);
  const conserved = mass.expected && sides.every((side) => Math.abs(mass[side] / mass.expected - 1) < 0.002);
  return h(
    'div',
    { class: 'tiles' },
    sides.map((side) =>
      tile(
        `Mean |r̃|, ${side} answers`,
        mass[side].toFixed(4),
        mass.expected ? `α₁ + α₂ = ${number(mass.expected)}` : null,
      ),
    ),
    mass.expected &&
      tile(
        'Reward mass',
        conserved ? 'conserved' : 'not conserved',
        conserved
          ? 'weighting moves reward between tokens and creates none'
          : 'as with geometric means or an entropy clip',
      ),
  );
}

function spreadOf(run, r, many) {
  const { credit } = run;
  const head = h('h2', {}, many && runMark(r), visible(run.name));
  if (!credit.entropy && !credit.credit)
    return h(
      'section',
      { class: 'run' },
      head,
      h('p', { class: 'calm' }, 'No entropy or credit was recorded, so there is nothing to show here.'),
    );
  return h(
    'section',
    { class: 'run' },
    head,
    h(
      'p',
      { class: 'quiet' },
      `Over the ${whole(credit.tokens)} trained tokens of the ${plural(run.groups.length, 'group')} in this page. Credit is the advantage used in training.`,
    ),
    massCard(credit.mass),
    h(
      'div',
      { class: 'charts three' },
      histogram('Entropy', credit.entropy, 'of tokens, in nats; logarithmic axis'),
      histogram('Credit', credit.credit, 'advantage of tokens, without groups that have no signal'),
      deciles(credit.deciles),
    ),
    credit.words
      ? h(
          'div',
          { class: 'charts two' },
          wordTable(
            'Words with the most credit',
            'in correct answers: |advantage| relative to the mean token of the same answer',
            credit.words.correct,
            'right',
          ),
          wordTable(
            'Words with the most penalty',
            'in wrong answers: |advantage| relative to the mean token of the same answer',
            credit.words.wrong,
            'wrong',
          ),
        )
      : credit.credit &&
          h(
            'p',
            { class: 'calm' },
            'Every token of an answer got the same credit (as with GRPO), so no word stands out.',
          ),
  );
}

const spreadView = (report) =>
  h(
    'div',
    { class: 'page wide' },
    report.runs.map((run, r) => spreadOf(run, r, report.runs.length > 1)),
  );
