// Where entropy and credit lie over the groups of one run, and over its training. Every mark opens its tokens.

const WIDE = 420;
const HIGH = 170;
const SIDES = ['correct', 'wrong'];
const isSide = (answer, name) => answer.correct === (name === 'correct');
const sideSign = { correct: '✓ correct', wrong: '✗ wrong' };
const sideKey = (name, text) => h(`span.key-${sideClass(name === 'correct')}`, `${sideSign[name]}${text}`);

/** A rectangle that opens its tokens; `drawing` listens for all of them. */
function openMark(name, look, label, act) {
  const mark = s(`rect.opens.${name}`, { role: 'button', tabindex: -1, 'aria-label': label, ...look });
  mark.act = act;
  return mark;
}

/** A cell of a heat map, in a row counted from below. */
function cellMark(name, x, row, width, height, deep, label, act) {
  const y = HIGH - 22 - height * (row + 1);
  return openMark(name, { x, y, width, height, 'fill-opacity': deep.toFixed(2) }, label, act);
}

/** An SVG with one tab stop: the arrow keys move between its marks, Enter or a click opens one. */
function drawing(label, ...parts) {
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

const spreadFigure = (title, note, rows, svg, key) => figure(title, note, rows, (box) => box.append(svg()), { key });
const below = (text, x, anchor = 'start') => s('text', { x, y: HIGH - 6, 'text-anchor': anchor }, text);
const beside = (text, x, y) => s('text', { x, y, 'text-anchor': 'end' }, text);
const across = (y, name, from = 10) => s(`line.${name}`, { x1: from, x2: WIDE - 10, y1: y, y2: y });
const upTo = (top) => (v) => HIGH - 22 - ((HIGH - 40) * v) / top; // the height of a value
const hasBoth = (answer, t) => Number.isFinite(answer.entropy?.[t]) && Number.isFinite(answer.advantage?.[t]);

/** The tokens of one tenth by entropy of the answers with an outcome, of one period of training if given. */
const openTenth = (r, name, { tops }, d, period = null) =>
  openTokens(
    `${sideSign[name]}${period ? `, ${stepsOf(period)}` : ''}: tenth ${d + 1} by entropy`,
    r,
    (answer, t, group) => group.credited && isSide(answer, name) && hasBoth(answer, t),
    { tenth: { d, tops }, period },
  );

/** Two outlines over one axis: correct solid and blue, wrong dashed and orange. Each bin opens its tokens. */
function histogram(r, title, data, note, signal) {
  if (!data) return null;
  const bins = data.correct.length;
  const log = signal === 'entropy';
  const x = (k) => 10 + ((WIDE - 20) * k) / bins;
  const y = upTo(Math.max(...data.correct, ...data.wrong, 1e-9));
  const outline = (parts) =>
    `M${x(0)},${y(0)}${parts.map((v, k) => `L${x(k)},${y(v)}L${x(k + 1)},${y(v)}`).join('')}L${x(bins)},${y(0)}`;
  const { low, high } = data;
  const edge = (k) => (log ? low * (high / low) ** (k / bins) : low + ((high - low) * k) / bins);
  const inBin = (k) => (answer, t, group) => {
    const v = answer[signal]?.[t];
    if (!isKnown(v) || (signal === 'advantage' && !group.credited)) return false;
    return (k === 0 || v >= edge(k)) && (k === bins - 1 || v < edge(k + 1));
  };
  const bin = (_, k) => {
    const where = `${title} ${short(edge(k))} to ${short(edge(k + 1))}`;
    const [right, wrong] = SIDES.map((side) => percent(data[side][k], 1));
    const label = `${where}: ${right} of the tokens of correct answers, ${wrong} of wrong ones`;
    const look = { x: x(k), width: x(1) - x(0), y: 10, height: HIGH - 32 };
    return openMark('bin', look, label, () => openTokens(where, r, inBin(k)));
  };
  const svg = () =>
    drawing(
      `${title}: mean ${number(data.mean_correct)} in correct answers, ${number(data.mean_wrong)} in wrong ones`,
      s('path.side-right', { d: outline(data.correct) }),
      s('path.side-wrong', { d: outline(data.wrong) }),
      across(y(0), 'grid'),
      below(short(low), 10),
      below(short(high), WIDE - 10, 'end'),
      data.correct.map(bin),
    );
  const row = (v, k) => [edge(k), edge(k + 1), v, data.wrong[k]];
  const rows = () => [['from', 'to', ...SIDES], ...data.correct.map(row)];
  const key = SIDES.map((side) => sideKey(side, `, mean ${number(data[`mean_${side}`])}`));
  return spreadFigure(title, note, rows, svg, key);
}

function deciles(r, data) {
  if (!data) return null;
  const sides = SIDES.filter((name) => data[name]);
  const y = upTo(Math.max(0.14, ...sides.flatMap((name) => data[name].shares)));
  const wide = (WIDE - 20) / 10;
  const bar = (name, k, v, d) => {
    const [x, width] = [10 + wide * d + 4 + (k * (wide - 8)) / sides.length, (wide - 8) / sides.length - 1];
    const look = { x, width, y: y(v), height: y(0) - y(v) };
    const top = short(data[name].tops[d]);
    const label = `${name}, tenth ${d + 1} (entropy up to ${top}): ${percent(v, 1)} of the credit`;
    return openMark(`bar-${sideClass(name === 'correct')}`, look, label, () => openTenth(r, name, data[name], d));
  };
  const svg = () =>
    drawing(
      sides.map((name) => `${name}: ${data[name].shares.map((v) => percent(v, 1)).join(', ')}`).join('; '),
      sides.map((name, k) => data[name].shares.map((v, d) => bar(name, k, v, d))),
      across(y(0.1), 'even'),
      across(y(0), 'grid'),
      below('sure', 10),
      below('unsure', WIDE - 10, 'end'),
    );
  const rows = () => [
    ['outcome', 'tenth', 'highest_entropy', 'share_of_credit'],
    ...sides.flatMap((name) => data[name].shares.map((v, d) => [name, d + 1, data[name].tops[d], v])),
  ];
  const most = (name) => `: tenth with the highest entropy ${percent(data[name].shares[9], 1)}`;
  const key = [sides.map((name) => sideKey(name, most(name))), quiet('dotted: 10 % each, as GRPO gives')];
  const note = 'tokens in ten equal parts, by increasing entropy';
  return spreadFigure('Share of |credit| by entropy', note, rows, svg, key);
}

/** Entropy against credit: the more tokens in a cell, the deeper. */
function creditMap(r, data) {
  if (!data) return null;
  const { entropy, credit, counts } = data;
  const most = Math.max(...counts.flat());
  const [width, height] = [(WIDE - 50) / (entropy.length - 1), (HIGH - 34) / (credit.length - 1)];
  const inside = (v, edges, k) => (k === 0 || v >= edges[k]) && (k === edges.length - 2 || v < edges[k + 1]);
  const inCell = (c, e) => (answer, t, group) =>
    group.credited &&
    hasBoth(answer, t) &&
    inside(answer.entropy[t], entropy, e) &&
    inside(answer.advantage[t], credit, c);
  const mark = (n, c, e) => {
    const range = (edges, k) => `${short(edges[k])} to ${short(edges[k + 1])}`;
    const where = `entropy ${range(entropy, e)}, credit ${range(credit, c)}`;
    const deep = 0.15 + (0.85 * Math.log1p(n)) / Math.log1p(most);
    const act = () => openTokens(where, r, inCell(c, e));
    return cellMark('cell', 40 + width * e, c, width, height, deep, `${where}: ${plural(n, 'token')}`, act);
  };
  const [low, top] = [credit[0], credit.at(-1)];
  const zero = low < 0 && top > 0 ? HIGH - 22 - ((HIGH - 34) * -low) / (top - low) : null;
  const svg = () =>
    drawing(
      'Entropy against credit',
      counts.map((row, c) => row.map((n, e) => n > 0 && mark(n, c, e))),
      zero && [across(zero, 'even', 40), beside('0', 36, zero + 4)],
      beside(short(top), 36, 20),
      beside(short(low), 36, HIGH - 24),
      below(short(entropy[0]), 40),
      below(short(entropy.at(-1)), WIDE - 10, 'end'),
    );
  const rows = () => [
    ['entropy_from', 'entropy_to', 'credit_from', 'credit_to', 'tokens'],
    ...counts.flatMap((row, c) => row.map((n, e) => [entropy[e], entropy[e + 1], credit[c], credit[c + 1], n])),
  ];
  return spreadFigure('Entropy against credit', 'across: entropy in nats, logarithmic; up: credit', rows, svg);
}

const stepsOf = ({ from, to }) => (from === to ? `step ${whole(from)}` : `steps ${whole(from)} to ${whole(to)}`);
const inPeriod = ({ from, to }, step) => step >= from && step <= to;
const periodAxis = (periods) => [below(stepsOf(periods[0]), 60), below(stepsOf(periods.at(-1)), WIDE - 10, 'end')];

/** Deciles over training: a column per period, a row per tenth of entropy, depth for its share of the credit. */
function decileMap(r, periods, name) {
  const some = periods.filter((p) => p.deciles[name]);
  if (some.length < 2) return null;
  const values = some.flatMap((p) => p.deciles[name].shares);
  const [low, top] = [Math.min(0.08, ...values), Math.max(0.12, ...values)];
  const [width, height] = [(WIDE - 70) / periods.length, (HIGH - 34) / 10];
  const mark = (p, k, v, d) => {
    const deep = 0.05 + (0.95 * (v - low)) / (top - low);
    const label = `${stepsOf(p)}, tenth ${d + 1}: ${percent(v, 1)} of the credit`;
    const act = () => openTenth(r, name, p.deciles[name], d, p);
    return cellMark(`cell.${name}`, 60 + width * k, d, width, height, deep, label, act);
  };
  const svg = () =>
    drawing(
      `Share of credit by entropy over training, ${name} answers`,
      periods.map((p, k) => p.deciles[name]?.shares.map((v, d) => mark(p, k, v, d))),
      beside('unsure', 54, 22),
      beside('sure', 54, HIGH - 26),
      periodAxis(periods),
    );
  const rows = () => [
    ['from_step', 'to_step', 'tenth', 'share_of_credit'],
    ...some.flatMap((p) => p.deciles[name].shares.map((v, d) => [p.from, p.to, d + 1, v])),
  ];
  const note = `from ${percent(low)} to ${percent(top)}, deepest; each tenth has 10 % with GRPO`;
  return spreadFigure(`Credit by entropy over training, ${name}`, note, rows, svg);
}

/** A share per period as bars. */
function periodBars(r, periods, key, title, note, test) {
  if (periods.length < 2 || periods.every((p) => p[key] === null)) return null;
  const values = periods.map((p) => p[key] || 0);
  const top = Math.max(...values, 1e-4);
  const wide = (WIDE - 70) / periods.length;
  const y = upTo(top);
  const bar = (p, k) => {
    const [x, width] = [60 + wide * k + 1, Math.max(1, wide - 2)];
    const look = { x, width, y: y(values[k]), height: y(0) - y(values[k]) };
    const act = () => openTokens(`${title}, ${stepsOf(p)}`, r, test, { period: p });
    return openMark(`bar-${key}`, look, `${stepsOf(p)}: ${percent(values[k], 2)}`, act);
  };
  const svg = () =>
    drawing(
      title,
      periods.map(bar),
      across(y(0), 'grid', 60),
      beside(percent(top, 1), 54, y(top) + 4),
      beside('0', 54, y(0)),
      periodAxis(periods),
    );
  const rows = () => [['from_step', 'to_step', key], ...periods.map((p) => [p.from, p.to, p[key]])];
  return spreadFigure(title, note, rows, svg);
}

/** Whether token t starts an occurrence of the word in its answer; a token that continues in letters belongs to it. */
const startsWord = (word) => ({ tokens }, t) => {
  const continues = (text, k) => /\p{L}$/u.test(text) && /^\p{L}/u.test(tokens[k] ?? '');
  if (t > 0 && continues(tokens[t - 1], t)) return false;
  let text = tokens[t];
  for (let k = t + 1; continues(text, k); k++) text += tokens[k];
  return text.trim() === word;
};

function wordButton(r, side, word, period = null) {
  const starts = startsWord(word);
  const test = (answer, t, group) => group.credited && isSide(answer, side) && starts(answer, t);
  const onclick = () => openTokens(`“${brief(word)}” in ${side} answers`, r, test, { period });
  return h('button.word', { onclick }, h('code', brief(word)));
}

/** The words with the most credit in each period. */
function wordsOverTraining(r, periods) {
  const some = periods.filter((p) => SIDES.some((side) => p.words[side]?.length));
  if (some.length < 2) return null;
  const every = Math.ceil(some.length / 8);
  const shown = some.filter((_, k) => k % every === 0 || k === some.length - 1);
  const words = (p, side) => (p.words[side] || []).map((word) => wordButton(r, side, word, p));
  const rows = shown.map((p) => [stepsOf(p).replace(/^steps? /, ''), ...SIDES.map((side) => words(p, side))]);
  const list = table('period-words', ['steps', ...SIDES.map((side) => sideSign[side])], rows);
  const title = h('h3', 'Words with the most credit over training');
  return h('div.chart', title, region('div.scroll-x', 'Words over training', list));
}

function wordTable(r, side, title, words) {
  const top = Math.max(...words.map((w) => Math.abs(w.extra)), 1e-9);
  const extra = (w) => {
    const share = `${(100 * Math.abs(w.extra)) / top}%`;
    return h('td.extra', { '--share': share }, signed(w.extra, (x) => percent(x, 1)));
  };
  const rows = words.map((w) => [wordButton(r, side, w.word), whole(w.uses), extra(w)]);
  return h(
    `div.chart.words.${sideClass(side === 'correct')}`,
    h('h3', title),
    h('p.quiet', `in ${side} answers: |advantage| relative to the mean token of the same answer`),
    words.length ? table('', ['word', 'uses', 'relative to the mean'], rows) : quiet('Too few words.'),
  );
}

function massCard(mass) {
  if (!mass) return null;
  const { expected } = mass;
  const total = expected && `α₁ + α₂ = ${number(expected)}`;
  const sides = SIDES.filter((side) => mass[side] !== undefined);
  const conserved = expected && sides.every((side) => Math.abs(mass[side] / expected - 1) < 0.002);
  const why = conserved
    ? 'weighting moves reward between tokens and creates none'
    : 'as with geometric means or an entropy clip';
  const tile = (label, main, note) =>
    h('div.tile', h('span.tile-label', label), h('span.tile-main', main), note && h('span.tile-note', note));
  return h(
    'div.tiles',
    sides.map((side) => tile(`Mean |r̃|, ${side} answers`, mass[side].toFixed(4), total)),
    expected && tile('Reward mass', conserved ? 'conserved' : 'not conserved', why),
  );
}

function spreadOf(run, r) {
  const { credit } = run;
  if (!credit.entropy && !credit.credit)
    return h('p.calm', 'No entropy or credit was recorded, so there is nothing to show here.');
  const { periods, words } = credit;
  const bars = (key, title, note, test) => periodBars(r, periods, key, `${title} over training`, note, test);
  const isNearZero = (answer, t) => answer.entropy?.[t] < SURE;
  const overTraining = known([
    ...SIDES.map((side) => decileMap(r, periods, side)),
    bars('flipped', 'Flipped tokens', 'share of tokens with credit of the wrong sign', isFlipped),
    bars('sure', 'Near-zero entropy', `share of tokens below ${SURE} nats`, isNearZero),
  ]);
  const groups = plural(run.groups.length, 'group');
  const over = `Over the ${whole(credit.tokens)} trained tokens of the ${groups} in this page.`;
  return [
    h('p.quiet', `${over} Credit is the advantage used in training. Click a bar, a cell or a word to see its tokens.`),
    massCard(credit.mass),
    h(
      'div.charts',
      histogram(r, 'Entropy', credit.entropy, 'of tokens, in nats; logarithmic axis', 'entropy'),
      histogram(r, 'Credit', credit.credit, 'advantage of tokens, without groups that have no signal', 'advantage'),
      deciles(r, credit.deciles),
      creditMap(r, credit.map),
    ),
    overTraining.length > 0 && [h('h2', 'Over training'), h('div.charts', overTraining)],
    wordsOverTraining(r, periods),
    words &&
      h(
        'div.charts.two',
        wordTable(r, 'correct', 'Words with the most credit', words.correct),
        wordTable(r, 'wrong', 'Words with the most penalty', words.wrong),
      ),
    !words &&
      credit.credit &&
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
    if (page.dataset.run === String(r)) return drawVisible();
    page.dataset.run = r;
    const options = recorded.map((k) => [String(k + 1), `${k + 1} ${visible(runs[k].name)}`]);
    const change = (value) => {
      set({ shown: value });
      page.shown();
    };
    const runChoice = recorded.length > 1 && choice('Run', options, String(r + 1), change);
    refill(page, h('div.head', h('h2', runMark(r), visible(runs[r].name)), runChoice), spreadOf(runs[r], r));
    drawVisible();
  };
  return page;
}
