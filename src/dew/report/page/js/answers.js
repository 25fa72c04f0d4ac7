// A group's answers one below the other, every token coloured by the chosen signal.

const FIRST_TOKENS = 2000;

const sideClass = (correct) => (correct ? 'right' : 'wrong');
const outcome = ({ correct }) => h(`span.outcome.${sideClass(correct)}`, correct ? '✓ correct' : '✗ wrong');

/** The chosen signal; else credit relative to GRPO, or the entropy where credit is uniform. */
function chosenSignal(group) {
  const names = available(group);
  const wanted = [state.signal, view.place.head.spread ? 'relative' : 'entropy', ...names];
  return wanted.find((name) => names.includes(name)) || 'advantage';
}

/** The colour scale of a group: of a signal, or of the difference of the two rules that are compared. */
function scaleOf(group) {
  const signal = state.mode === 'methods' ? 'difference' : chosenSignal(view.group);
  const values = group.answers.flatMap((answer) => (answer[signal] || []).filter((_, t) => answer.live[t]));
  return { signal, ...makeScale(SIGNALS[signal]?.scale || 'difference', values) };
}

/** The scale that a group is painted with: the same prompt elsewhere has its own. */
const coloursOf = (group) => (group === view.group ? view.scale : scaleOf(group));

/** The whole answer as a barcode, as long as the answer is beside the longest. */
function strip(answer, longest) {
  const width = Math.max(1, Math.min(answer.tokens.length, 1500));
  const share = `${(100 * answer.tokens.length) / longest}%`;
  const canvas = h('canvas.strip', { width, height: 1, 'aria-hidden': 'true', '--share': share });
  const pixels = new ImageData(width, 1);
  canvas.draw = (scale = canvas.scale) => {
    canvas.scale = scale;
    for (let x = 0; x < width; x++) {
      const t = Math.floor((x * answer.tokens.length) / width);
      const value = answer.live[t] ? answer[scale.signal]?.[t] : null;
      if (!isKnown(value)) continue;
      const [hue, deep] = scale.of(value);
      pixels.data.set([...rgb(hue), hue === 'none' ? 0 : 2.55 * deep], 4 * x);
    }
    canvas.getContext('2d', { willReadFrequently: true }).putImageData(pixels, 0, 0);
  };
  return canvas;
}

function facets(answer) {
  const flips = answer.tokens.filter((_, t) => isFlipped(answer, t)).length;
  const rewards = Object.entries(answer.rewards || {}).map(([name, v]) => `${visible(name)} ${number(v)}`);
  const { extra, extracted, verdict } = answer;
  const facts = [
    `reward ${number(answer.reward)}${extra ? ` ${signed(extra)} charge` : ''}`,
    rewards.length > 0 && rewards.join(' · '),
    flips > 0 && h('b.flips', plural(flips, 'flipped token')),
    plural(answer.tokens.length, 'token'),
    isKnown(extracted) && ['answered ', h('code', brief(extracted))],
    verdict && !['correct', 'wrong'].includes(verdict) && h('b', `verifier: ${visible(verdict)}`),
    answer.truncated && h('b', 'truncated'),
    answer.guided && h('b', 'from the guide'),
  ];
  return h('span.facets', facts.filter(Boolean).map((fact) => h('span', fact)));
}

/** Credit of the wrong sign: a penalty in an answer that is better than its group's mean, a reward in a worse one. */
const isFlipped = (answer, t) => Boolean(answer.advantage && answer.live[t] && answer.advantage[t] * answer.above < 0);

/** An entropy so near to zero that a weight made of it is rounding noise. */
const isNoise = ({ entropy, live }, t) => live[t] && isKnown(entropy?.[t]) && entropy[t] < SURE;

/** The classes of a token: what it is, and its colour. */
function tokenClass(answer, t, scale, found) {
  const value = answer[scale.signal]?.[t];
  let name = answer.live[t] ? (isKnown(value) ? `t ${paintClass(scale.of(value))}` : 't') : 't dead';
  if (isFlipped(answer, t)) name += ' flip';
  if (isNoise(answer, t)) name += ' sure';
  if (found?.(t)) name += ' hit';
  if (isMarkup(answer.tokens[t])) name += ' markup';
  return name;
}

/** Without `h`, because a group has thousands of them. */
function tokenSpans(answer, from, to) {
  return answer.tokens.slice(from, to).map((text, k) => {
    const span = document.createElement('span');
    span.setAttribute('data-t', from + k);
    span.textContent = running(text);
    return span;
  });
}

/** Paint the tokens of answer i in a box, on the scale of its group. */
function paintTokens(box, group, i) {
  const scale = coloursOf(group);
  const found = tokensFound(group.answers[i].tokens);
  for (const span of box.querySelectorAll('[data-t]'))
    span.className = tokenClass(group.answers[i], Number(span.dataset.t), scale, found);
}

/** The answers in the order that the controls ask for, identical ones together: lists of places. */
function folded(group) {
  const order = orderOf(group);
  if (state.mode === 'columns') return order.map((i) => [i]);
  const same = new Map();
  for (const i of order) {
    const { tokens, correct, reward } = group.answers[i];
    const key = JSON.stringify([correct, reward, tokens]);
    same.set(key, [...(same.get(key) || []), i]);
  }
  return [...same.values()];
}

const answerCards = (group) => folded(group).map((places) => answerCard(group, places, longestOf(group)));

/** Where a wrong answer leaves its nearest correct one, how the blame lies around that, and both from there on. */
function divergence(group, i) {
  const [at, j, ...parts] = group.answers[i].nearest || [];
  if (!parts.length) return null;
  const [before, here, after] = parts.map((share) => percent(share));
  const side = (k) => {
    const answer = group.answers[k];
    const box = h('div.tokens', { 'data-i': k }, outcome(answer), ` #${k + 1} … `, tokenSpans(answer, at, at + 200));
    paintTokens(box, group, k);
    return box;
  };
  const fill = ({ target }) => target.children[1] || target.append(h('div.beside', side(i), side(j)));
  const blame = `${before} of the blame before, ${here} at it, ${after} after`;
  const text = `Leaves correct answer #${j + 1} at token ${at + 1}: ${blame}`;
  return h('details.diverges', { ontoggle: fill }, h('summary', text));
}

/** An answer's card: filled when it is in sight or the page is idle, then painted in place when colours change. */
function answerCard(group, places, longest) {
  const answer = group.answers[places[0]];
  const card = h(`article.answer.${sideClass(answer.correct)}`, { 'data-i': places[0] });
  const body = h('div.tokens');
  const more = h('button.small.more-tokens', { onclick: () => grow() });
  const grow = () => {
    const shown = body.childElementCount;
    body.append(...tokenSpans(answer, shown, shown + FIRST_TOKENS));
    paintTokens(body, group, places[0]);
    const left = answer.tokens.length - body.childElementCount;
    more.textContent = `Show ${whole(Math.min(left, FIRST_TOKENS))} more of ${whole(left)} hidden tokens`;
    more.hidden = !left;
  };
  const fill = () => {
    const header = h('header',
      outcome(answer),
      places.length > 1 && h('b.times', { title: `answers ${places.map((k) => k + 1).join(', ')}` }, `× ${places.length}`),
      quiet(places.slice(0, 4).map((k) => `#${k + 1}`).join(' '), places.length > 4 ? ' …' : ''),
      facets(answer),
    );
    const barcode = strip(answer, longest);
    barcode.onclick = ({ offsetX }) => {
      const at = Math.floor((offsetX / barcode.clientWidth) * answer.tokens.length);
      if (group === view.group) pin({ i: places[0], t: Math.min(answer.tokens.length - 1, at) });
    };
    grow();
    refill(card, header, barcode, body, more, divergence(group, places[0]));
  };
  const redraw = () => {
    card.drawn = cardLook();
    if (!card.firstChild) fill();
    else for (const box of card.querySelectorAll('.tokens')) paintTokens(box, group, box.dataset.i ?? places[0]);
    card.querySelector('.strip').draw(coloursOf(group));
    if (group === view.group && places.includes(view.pinned?.i)) markPinned();
  };
  const reach = (t) => {
    if (card.waits()) card.redraw();
    while (body.childElementCount <= t) grow();
  };
  return Object.assign(card, { places, reach, redraw, later: true, waits: () => card.drawn !== cardLook() });
}

const SORTS = {
  given: ['as sampled', () => 0],
  length: ['longest first', (answer) => answer.tokens.length],
  reward: ['by reward', (answer) => answer.reward],
  credit: ['by mean |credit|', (answer) => mean(known(answer.advantage || []).map(Math.abs))],
};

/** The answers' places in the order and selection that the controls ask for. */
function orderOf({ answers }) {
  const [, size] = SORTS[state.sort] || SORTS.given;
  const places = [...answers.keys()].sort((a, b) => size(answers[b]) - size(answers[a]));
  return places.filter((i) => state.only === 'all' || answers[i].correct === (state.only === 'correct'));
}

const longestOf = (group) => Math.max(1, ...group.answers.map((answer) => answer.tokens.length));

/** What the tokens on a card are painted by. */
const cardLook = () => JSON.stringify([state.mode, state.signal, state.q, state.rule, state.than, view.what]);

/** The cards of the open group; the same elements as before if only colours have changed. */
function answersView(group) {
  const key = [state.only, state.sort].join();
  if (view.cards?.group !== group || view.cards.key !== key) {
    const none = h('p.calm', 'This group has no answers with the selected outcome.');
    view.cards = { group, key, box: h('div.answers', orderOf(group).length ? answerCards(group) : none) };
  }
  return view.cards.box;
}
