// Tokens of all groups that fit a query such as `H<0.01 & wrong & |A|>2 & step>200`: how many, their credit, and where.

const signal = (name) => (answer, t) => answer[name]?.[t];
const FIELDS = { h: signal('entropy'), a: signal('advantage'), reward: ({ reward }) => reward, position: (_, t) => t + 1 };
for (const name of ['relative', 'logp', 'ratio']) FIELDS[name] = signal(name);
const PLACES = { step: ({ head }) => head.step, group: ({ head }) => head.group, run: ({ r }) => r + 1 };
const KINDS_OF_TOKENS = {
  correct: ({ correct }) => correct,
  wrong: ({ correct }) => !correct,
  flipped: (answer, t) => isFlipped(answer, t),
  credited: (_, __, group) => group.credited,
};
const ORDERS = { '<': [-1], '<=': [-1, 0], '=': [0], '>=': [1, 0], '>': [1] };
const QUERY_HELP =
  'Join with &: correct, wrong, flipped, "word", and < <= > >= or = of H (entropy), A (advantage), |A|, ' +
  'relative (to GRPO), logp, ratio, reward, position, step, group, run.';

/** Whether token t starts an occurrence of the word in its answer; a token that continues in letters belongs to it. */
const startsWord = (word) => ({ tokens }, t) => {
  const continues = (text, k) => /\p{L}$/u.test(text) && /^\p{L}/u.test(tokens[k] ?? '');
  if (t > 0 && continues(tokens[t - 1], t)) return false;
  let text = tokens[t];
  for (let k = t + 1; continues(text, k); k++) text += tokens[k];
  return text.trim() === word;
};

/** What is unclear in a query, or two tests: of a group's place, and of token t of an answer in the group. */
function tokenTests(query) {
  const [ofPlace, ofToken] = [[], []];
  const parts = query.match(/"(?:.+?)"(?=\s*(?:&|$))|[^&]+/g)?.map((part) => part.trim()).filter(Boolean) || [];
  for (const text of parts.length ? parts : ['']) {
    const name = text.toLowerCase();
    const [, field, sign, digits] = name.match(/^\|?(\w+)\|?\s*([<>]=?|=)\s*([-−]?[\d.]+(?:e-?\d+)?)$/) || [];
    const values = [PLACES, FIELDS].find((fields) => Object.hasOwn(fields, field));
    if (text.startsWith('"')) ofToken.push(startsWord(text.slice(1, -1)));
    else if (Object.hasOwn(KINDS_OF_TOKENS, name)) ofToken.push(KINDS_OF_TOKENS[name]);
    else if (!values) return [`${text && `“${text}” is not understood. `}${QUERY_HELP}`];
    else {
      const value = Number(digits.replace('−', '-'));
      const size = name.startsWith('|') ? Math.abs : (x) => x;
      const isFit = (x) => isKnown(x) && ORDERS[sign].includes(Math.sign(size(x) - value));
      (values === PLACES ? ofPlace : ofToken).push((...args) => isFit(values[field](...args)));
    }
  }
  return [null, ...[ofPlace, ofToken].map((tests) => (...args) => tests.every((test) => test(...args)))];
}

function tokenRow({ place, group, i, t }) {
  const { tokens, correct, entropy, advantage } = group.answers[i];
  const href = `${addressOf(place)}&token=${i + 1}.${t + 1}`;
  const around = (from, to) => visible(tokens.slice(Math.max(0, from), to).join('')).replace(/\s+/g, ' ');
  const [before, after] = [around(t - 6, t).slice(-60), around(t + 1, t + 6).slice(0, 60)];
  const where = h('td', runMark(place.r), h('a', { href }, `step ${whole(group.step)} · group ${group.group}`));
  const context = h('td.context', before, h('mark', brief(tokens[t]).slice(0, 60)), after);
  const numbers = [entropy?.[t], advantage?.[t]].map((v) => h('td', number(v)));
  return h('tr', where, h('td', correct ? '✓' : '✗'), context, numbers);
}

/** Visit every trained token. When the page is due to be painted, `pause` says how far this is; false: stop. */
async function visitTokens(places, visit, pause) {
  let end = performance.now() + SLICE;
  for (const [k, place] of places.entries()) {
    for (const { n } of places.slice(k, k + 8)) groupAt(n); // unpacked while this one is searched
    const group = await groupAt(place.n);
    group.answers.forEach((answer, i) => {
      for (let t = 0; t < answer.tokens.length; t++) if (answer.live[t]) visit(answer, { place, group, i, t });
    });
    if (performance.now() < end) continue;
    if (!(await pause(k + 1))) return false;
    end = performance.now() + SLICE;
  }
  return true;
}

/** The credit of these tokens in 40 bins, as Python counts those of all tokens. */
function creditBins(found) {
  const sides = { correct: [], wrong: [] };
  for (const { group, i, t } of found) {
    const { correct, advantage } = group.answers[i];
    if (isKnown(advantage?.[t])) sides[correct ? 'correct' : 'wrong'].push(advantage[t]);
  }
  const all = [...sides.correct, ...sides.wrong];
  const [low, high] = [Math.min, Math.max].map((end) => all.reduce((a, b) => end(a, b), all[0]));
  if (!(high > low)) return null;
  const counted = SIDES.map((name) => {
    const shares = Array(40).fill(0);
    const bin = (v) => Math.min(39, Math.floor((40 * (v - low)) / (high - low)));
    for (const v of sides[name]) shares[bin(v)] += 1 / sides[name].length;
    return { [name]: shares, [`mean_${name}`]: sides[name].length ? mean(sides[name]) : null };
  });
  return Object.assign({ low, high }, ...counted);
}

/** A box for a query; it opens the tokens that fit. */
function findForm(query) {
  const look = { type: 'search', value: query, 'aria-label': 'Find tokens', placeholder: 'H<0.01 & wrong & |A|>2' };
  const box = h('input', { ...look, title: QUERY_HELP, name: 'find' });
  const onsubmit = (event) => {
    event.preventDefault();
    openTokens(box.value);
  };
  return h('form.controls.find', { onsubmit }, box, h('button.small', 'Find tokens'));
}

/** Open the list of the tokens that fit a query; the address remembers it, and Back closes it. */
async function openTokens(query) {
  const box = byId('tokens');
  const isRemembered = state.find === query;
  state.find = query;
  if (!box.open && !isRemembered) history.pushState({ full: true, dialog: true }, '', fullAddress());
  else history.replaceState({ ...history.state, full: true }, '', fullAddress());
  const close = h('button.small.close', { onclick: () => box.close(), 'aria-label': 'Close' }, '✕');
  const count = h('p.quiet', { role: 'status' }, 'Searching …');
  const list = table('token-table', ['group', 'outcome', 'token', 'entropy', 'credit'], []);
  const [body] = list.tBodies;
  body.addEventListener('click', ({ target }) => {
    if (!target.closest('a')) return;
    history.replaceState(null, ''); // Back from the group opens the list again
    state.find = '';
    box.close();
  });
  const scroll = region('div.scroll-x', 'Tokens', list);
  const bars = h('div');
  scroll.ariaBusy = 'true';
  refill(box, close, h('h2', 'Tokens'), findForm(query), count, bars, scroll);
  if (!box.open) box.showModal();
  const found = [];
  const [unclear, ofPlace, ofToken] = tokenTests(query);
  if (unclear) {
    scroll.remove();
    return refill(count, unclear);
  }
  const grow = () => {
    const next = body.rows.length + Math.ceil(window.innerHeight / 24); // more than fit
    body.append(...found.slice(body.rows.length, next).map(tokenRow));
  };
  box.onscroll = () => box.scrollTop + 2 * box.clientHeight > box.scrollHeight && grow();
  const visit = (answer, token) => ofToken(answer, token.t, token.group) && found.push(token);
  const places = view.all.filter((place) => ofPlace(place));
  const pause = async (searched) => {
    if (!body.firstChild) grow();
    count.textContent = `Searching … ${searched} of ${plural(places.length, 'group')}`;
    await idle();
    return list.isConnected; // else closed, or another list is open
  };
  if (!(await visitTokens(places, visit, pause))) return;
  const groups = new Set(found.map(({ place }) => place)).size;
  count.textContent = `${plural(found.length, 'token')} in ${plural(groups, 'group')}`;
  const figure = histogram(query, 'Credit', creditBins(found), 'of these tokens; a bin narrows the query', 'advantage');
  refill(bars, figure);
  figure?.redraw();
  grow();
  scroll.ariaBusy = null;
}
