// Where entropy and credit lie over the groups of one run. Every mark opens its tokens.

const WIDE = 420;
const HIGH = 170;
const FLOOR_Y = HIGH - 22; // the height of 0
const SIDES = ['correct', 'wrong'];
const sideKey = (name, text) =>
  h(`span.key-${sideClass(name === 'correct')}`, `${name === 'correct' ? '✓' : '✗'} ${name}${text}`);

/** A rectangle that opens its tokens; `drawing` listens for all of them. */
const openMark = (name, look, label, act) =>
  Object.assign(s(`rect.opens.${name}`, { role: 'button', tabindex: -1, 'aria-label': label, ...look }), { act });

/** An SVG with one tab stop: the arrow keys move between its marks, Enter or a click opens one. */
function drawing(label, parts) {
  const act = ({ target }) => target.act?.();
  const svg = s('svg', { viewBox: `0 0 ${WIDE} ${HIGH}`, role: 'group', 'aria-label': label, onclick: act }, parts);
  const marks = [...svg.querySelectorAll('.opens')];
  marks[0]?.setAttribute('tabindex', 0);
  svg.addEventListener('mouseover', ({ target }) => {
    if (target.act && !target.firstChild) target.append(s('title', target.getAttribute('aria-label')));
  });
  svg.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === 'Enter' || event.key === ' ') act(event);
    else if (step) {
      const next = marks[(marks.indexOf(event.target) + step + marks.length) % marks.length];
      event.target.setAttribute('tabindex', -1);
      next.setAttribute('tabindex', 0);
      next.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return svg;
}

/** A figure whose parts are made when it is drawn; `csv` gives its table, with a head. */
const spreadFigure = (title, note, { label, parts, csv, key }) =>
  figure(title, note, csv, (box) => box.append(drawing(label, parts())), { key });

const below = (left, right) => [
  s('text', { x: 10, y: HIGH - 6 }, left),
  s('text', { x: WIDE - 10, y: HIGH - 6, 'text-anchor': 'end' }, right),
];
const across = (y, name) => s(`line.${name}`, { x1: 10, x2: WIDE - 10, y1: y, y2: y });
const heightOf = (top) => (v) => FLOOR_Y - ((HIGH - 40) * v) / top;

/** Bars in columns: [x, width] of column k of n. */
const columnAt = (n) => (k) => [10 + ((WIDE - 20) * k) / n, (WIDE - 20) / n];

/** Opens the tokens that fit all parts of a query; numbers as precise as the page has them. */
const opener = (...parts) => () => openTokens(parts.filter(Boolean).join(' & '));
const digits = (x) => Number(x.toPrecision(5));

/** Two outlines over one axis: correct solid and blue, wrong dashed and orange. Each bin opens its tokens. */
function histogram(query, title, data, note, signal) {
  if (!data) return null;
  const { low, high, correct, wrong } = data;
  const bins = correct.length;
  const edge = (k) => (signal === 'entropy' ? low * (high / low) ** (k / bins) : low + ((high - low) * k) / bins);
  const edges = [...correct.keys(), bins].map(edge);
  const column = columnAt(bins);
  const y = heightOf(Math.max(...correct, ...wrong, 1e-9));
  const outline = (shares) => {
    const top = (v, k) => `L${column(k)[0]},${y(v)}L${column(k + 1)[0]},${y(v)}`;
    return `M${column(0)[0]},${y(0)}${shares.map(top).join('')}L${column(bins)[0]},${y(0)}`;
  };
  const bin = (_, k) => {
    const [x, width] = column(k);
    const [from, to] = [edges[k], edges[k + 1]];
    const where = `${title} ${short(from)} to ${short(to)}`;
    const [right, other] = SIDES.map((side) => percent(data[side][k], 1));
    const label = `${where}: ${right} of the tokens of correct answers, ${other} of wrong ones`;
    const name = signal === 'entropy' ? 'H' : 'A';
    const inside = [k > 0 && `${name}>=${digits(from)}`, k < bins - 1 && `${name}<${digits(to)}`]; // the ends are open
    const act = opener(query, ...inside, name === 'A' && !query.includes('credited') && 'credited');
    return openMark('bin', { x, width, y: 10, height: HIGH - 32 }, label, act);
  };
  return spreadFigure(title, note, {
    label: `${title}: mean ${number(data.mean_correct)} in correct answers, ${number(data.mean_wrong)} in wrong ones`,
    parts: () => [
      SIDES.map((side) => s(`path.side-${sideClass(side === 'correct')}`, { d: outline(data[side]) })),
      [across(y(0), 'grid'), below(short(low), short(high)), correct.map(bin)],
    ],
    csv: () => [['from', 'to', ...SIDES], ...correct.map((v, k) => [edges[k], edges[k + 1], v, wrong[k]])],
    key: SIDES.map((side) => isKnown(data[`mean_${side}`]) && sideKey(side, `, mean ${number(data[`mean_${side}`])}`)),
  });
}

function deciles(query, data) {
  if (!data) return null;
  const sides = SIDES.filter((name) => data[name]);
  const y = heightOf(Math.max(0.14, ...sides.flatMap((name) => data[name].shares)));
  const bar = (name, k) => (v, d) => {
    const [left, wide] = columnAt(10)(d);
    const width = (wide - 8) / sides.length;
    const look = { x: left + 4 + k * width, width: width - 1, y: y(v), height: y(0) - y(v) };
    const { tops } = data[name];
    const label = `${name}, tenth ${d + 1} (entropy up to ${short(tops[d])}): ${percent(v, 1)} of the credit`;
    const inside = [name, 'credited', d > 0 && `H>${digits(tops[d - 1])}`, d < 9 && `H<=${digits(tops[d])}`];
    return openMark(`bar-${sideClass(name === 'correct')}`, look, label, opener(query, ...inside));
  };
  const most = (name) => `: tenth with the highest entropy ${percent(data[name].shares[9], 1)}`;
  return spreadFigure('Share of |credit| by entropy', 'tokens in ten equal parts, by increasing entropy', {
    label: sides.map((name) => `${name}: ${data[name].shares.map((v) => percent(v, 1)).join(', ')}`).join('; '),
    parts: () => [
      sides.map((name, k) => data[name].shares.map(bar(name, k))),
      [across(y(0.1), 'even'), across(y(0), 'grid'), below('sure', 'unsure')],
    ],
    csv: () => [
      ['outcome', 'tenth', 'highest_entropy', 'share_of_credit'],
      ...sides.flatMap((name) => data[name].shares.map((v, d) => [name, d + 1, data[name].tops[d], v])),
    ],
    key: [sides.map((name) => sideKey(name, most(name))), quiet('dotted: 10% each, as GRPO gives')],
  });
}

function wordTable(query, side, title, words) {
  const top = Math.max(...words.map((w) => Math.abs(w.extra)), 1e-9);
  const extra = (w) =>
    h('td.extra', { '--share': `${(100 * Math.abs(w.extra)) / top}%` }, signed(w.extra, (x) => percent(x, 1)));
  const button = ({ word }) =>
    h('button.word', { onclick: opener(`"${word}"`, side, 'credited', query) }, h('code', brief(word)));
  const rows = words.map((w) => [button(w), whole(w.uses), extra(w)]);
  return h(`div.chart.words.${sideClass(side === 'correct')}`,
    h('h3', title),
    h('p.quiet', `in ${side} answers: |advantage| relative to the mean token of the same answer`),
    words.length ? table('', ['word', 'uses', 'relative to the mean'], rows) : quiet('Too few words.'),
  );
}

function spreadOf(run, r) {
  const { credit, credit: { words } } = run;
  const query = manyRuns() ? `run=${r + 1}` : '';
  if (!credit.entropy && !credit.credit)
    return h('p.calm', 'No entropy or credit was recorded, so there is nothing to show here.');
  const parts = (shares) => shares.map((v) => percent(v)).join(', ');
  const groups = plural(run.groups.length, 'group');
  const over = `Over the ${whole(credit.tokens)} trained tokens of the ${groups} in this page.`;
  return [
    credit.blame && credit.words && // else credit is uniform
      h('p',
        `In wrong answers ${parts(credit.blame)} of the blame fall before, at and after the first token that differs `,
        `from the nearest correct answer; spread evenly, as by GRPO, it would be ${parts(credit.blame_even)}.`,
      ),
    h('p.quiet', `${over} Credit is the advantage used in training. Click a bar or a word to see its tokens.`),
    findForm(''),
    h('div.charts',
      histogram(query, 'Entropy', credit.entropy, 'of tokens, in nats; logarithmic axis', 'entropy'),
      histogram(query, 'Credit', credit.credit, 'advantage of tokens, without groups that have no signal', 'advantage'),
      deciles(query, credit.deciles),
    ),
    words &&
      h('div.charts.two',
        wordTable(query, 'correct', 'Words with the most credit', words.correct),
        wordTable(query, 'wrong', 'Words with the most penalty', words.wrong),
      ),
    !words && credit.credit &&
      h('p.calm', 'Every token of an answer got the same credit (as with GRPO), so no word stands out.'),
  ];
}

function spreadView({ runs }) {
  const page = h('div.page.wide');
  page.shown = () => {
    unpackAll();
    const recorded = runs.map((_, r) => r).filter((r) => runs[r].groups.length);
    const told = Number(state.shown) - 1;
    const r = recorded.includes(told) ? told : view.all.length ? mostTelling().r : 0;
    if (page.dataset.run !== String(r)) {
      page.dataset.run = r;
      const runChoice = recorded.length > 1 && chooseRun('shown', String(r + 1), recorded, page.shown);
      refill(page, h('div.head', h('h2', runMark(r), runName(r)), runChoice), spreadOf(runs[r], r));
    }
    drawVisible();
  };
  return page;
}
