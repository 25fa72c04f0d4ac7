// A group's answers one below the other, every token coloured by the chosen signal.

const FIRST_TOKENS = 2000;

const outcome = (answer) =>
  h('span', { class: `outcome ${answer.correct ? 'right' : 'wrong'}` }, answer.correct ? '✓ correct' : '✗ wrong');
const known = (list) => list.filter((v) => v !== null && v !== undefined);

/** Whether the open run recorded answers as whole texts (TRL's own files), each then one token. */
const onlyText = () => view.all[view.n].run.kind === 'trl';

/** The colour scale of one signal over a whole group. */
function scaleOf(group, signal, stretched) {
  const values = group.answers.flatMap((answer) => (answer[signal] || []).filter((_, t) => answer.live[t]));
  return makeScale(SIGNALS[signal].scale, values, stretched);
}

function paintToken(element, answer, t, signal, scale) {
  const value = answer[signal] ? answer[signal][t] : null;
  if (!answer.live[t]) element.dataset.hue = 'dead';
  else if (value === null || value === undefined) element.dataset.hue = 'none';
  else paint(element, scale.of(value));
}

/** The whole answer as a barcode, as long as the answer is beside the longest. */
function strip(answer, longest, signal, scale) {
  const width = Math.max(1, Math.min(answer.tokens.length, 4000));
  const canvas = h('canvas', {
    class: 'strip',
    width,
    height: 1,
    'aria-hidden': 'true',
    '--share': `${(100 * answer.tokens.length) / longest}%`,
  });
  const pixels = new ImageData(width, 1);
  canvas.draw = () => {
    for (let x = 0; x < width; x++) {
      const t = Math.floor((x * answer.tokens.length) / width);
      const value = answer.live[t] ? answer[signal]?.[t] : null;
      if (value === null || value === undefined) continue;
      const [hue, deep] = scale.of(value);
      const colour = rgb(hue);
      for (let k = 0; k < 3; k++) pixels.data[4 * x + k] = colour[k];
      pixels.data[4 * x + 3] = hue === 'none' ? 0 : 2.55 * deep;
    }
    canvas.getContext('2d', { willReadFrequently: true }).putImageData(pixels, 0, 0);
  };
  canvas.draw();
  return canvas;
}

function facets(answer) {
  const flips = answer.tokens.filter((_, t) => isFlipped(answer, t)).length;
  const rewards = Object.entries(answer.rewards || {});
  const facts = [
    `reward ${number(answer.reward)}${answer.extra ? ` ${signed(answer.extra)} charge` : ''}`,
    rewards.length ? h('span', { class: 'rewards' }, rewards.map(([name, v]) => `${visible(name)} ${number(v)}`).join(' · ')) : null,
    flips ? h('b', { class: 'flips' }, plural(flips, 'flipped token')) : null,
    onlyText() ? null : plural(answer.tokens.length, 'token'),
    answer.extracted !== null && answer.extracted !== undefined
      ? ['answered ', h('code', {}, brief(answer.extracted))]
      : null,
    answer.verdict && !['correct', 'wrong'].includes(answer.verdict)
      ? h('b', {}, `verifier: ${visible(answer.verdict)}`)
      : null,
    answer.truncated ? h('b', {}, 'truncated') : null,
    answer.guided ? h('b', {}, 'from the guide') : null,
  ];
  return h(
    'span',
    { class: 'facets' },
    known(facts).map((fact) => h('span', {}, fact)),
  );
}

/** Credit of the wrong sign: a penalty in an answer that is better than its group's mean, a reward in a worse one. */
const isFlipped = (answer, t) => Boolean(answer.advantage && answer.live[t] && answer.advantage[t] * answer.above < 0);

function tokenClass(answer, t, found) {
  const classes = ['t'];
  if (isFlipped(answer, t)) classes.push('flip');
  if (found?.has(t)) classes.push('hit');
  if (isMarkup(answer.tokens[t])) classes.push('markup');
  return classes.join(' ');
}

/** Without `h`, because a group has thousands of them. */
function tokenSpan(text, t, className = 't') {
  const span = document.createElement('span');
  span.className = className;
  span.dataset.t = t;
  span.textContent = running(text) || '∅';
  return span;
}

function tokenSpans(answer, from, to, signal, scale) {
  const found = tokensFound(answer.tokens);
  return answer.tokens.slice(from, to).map((text, k) => {
    const span = tokenSpan(text, from + k, tokenClass(answer, from + k, found));
    paintToken(span, answer, from + k, signal, scale);
    return span;
  });
}

/** Identical answers together: lists of places, in the order of the first. */
function folded(group, order) {
  if (state.fold !== 'yes') return order.map((i) => [i]);
  const same = new Map();
  for (const i of order) {
    const { tokens, correct, reward } = group.answers[i];
    const key = JSON.stringify([correct, reward, tokens]);
    same.set(key, [...(same.get(key) || []), i]);
  }
  return [...same.values()];
}

function answerCard(answer, places, longest, scale = view.scale) {
  const [i] = places;
  const body = h('div', { class: 'tokens' }, tokenSpans(answer, 0, FIRST_TOKENS, state.signal, scale));
  let shown = FIRST_TOKENS;
  const more = () => {
    const left = answer.tokens.length - shown;
    return (
      left > 0 &&
      h(
        'button',
        {
          class: 'small more-tokens',
          onclick: (event) => {
            body.append(...tokenSpans(answer, shown, shown + FIRST_TOKENS, state.signal, scale));
            shown += FIRST_TOKENS;
            event.target.replaceWith(more() || '');
          },
        },
        `Show ${whole(Math.min(left, FIRST_TOKENS))} more of ${whole(left)} hidden tokens`,
      )
    );
  };
  return h(
    'article',
    { class: `answer ${answer.correct ? 'right' : 'wrong'}`, 'data-i': i },
    h(
      'header',
      {},
      outcome(answer),
      places.length > 1 && h('b', { class: 'times', title: `answers ${places.map((k) => k + 1).join(', ')}` }, `× ${places.length}`),
      quiet(places.slice(0, 4).map((k) => `#${k + 1}`).join(' '), places.length > 4 ? ' …' : ''),
      facets(answer),
    ),
    strip(answer, longest, state.signal, scale),
    body,
    chance(answer, longest),
    more(),
  );
}

/** Where outcomes were predicted (learned credit): the chance of success along the answer, from pale (0) to deep (1). */
function chance(answer, longest) {
  if (!answer.value) return null;
  const [first, last] = [answer.value[0], answer.value[answer.value.length - 1]];
  const row = strip(answer, longest, 'value', makeScale('amount', [0, 1]));
  return h('div', { class: 'quiet chance' }, row, `predicted chance of success: ${number(first)} to ${number(last)}`);
}

/** The answers' places in the order and selection that the controls ask for. */
function orderOf(group) {
  const size = (i) => mean(known(group.answers[i].advantage || []).map(Math.abs));
  const by = {
    given: () => 0,
    longest: (a, b) => group.answers[b].tokens.length - group.answers[a].tokens.length,
    shortest: (a, b) => group.answers[a].tokens.length - group.answers[b].tokens.length,
    reward: (a, b) => group.answers[b].reward - group.answers[a].reward,
    credit: (a, b) => size(b) - size(a),
  }[state.sort];
  return group.answers
    .map((_, i) => i)
    .filter((i) => state.only === 'all' || group.answers[i].correct === (state.only === 'correct'))
    .sort(by);
}

function answersView(group) {
  const longest = Math.max(1, ...group.answers.map((answer) => answer.tokens.length));
  const order = orderOf(group);
  if (!order.length) return calm('This group has no answers with the selected outcome.');
  return h(
    'div',
    { class: 'answers' },
    folded(group, order).map((places) => answerCard(group.answers[places[0]], places, longest)),
  );
}
