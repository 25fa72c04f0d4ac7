// How the credit was made: the formula of one token with its numbers put in.

const bracketed = (x) => (x < 0 ? `(${number(x)})` : number(x));

const step = (name, formula, value, note) =>
  h(
    'li',
    {},
    h('span', { class: 'step-name' }, name),
    h('span', { class: 'formula' }, formula, value !== null && [' = ', h('b', {}, number(value))]),
    note && quiet(note),
  );

function signalTable(answer, t) {
  const names = Object.keys(SIGNALS).filter((name) => answer[name] && answer[name][t] !== null);
  return table('signals', null, names.map((name) => [SIGNALS[name].label, number(answer[name][t])]));
}

function poolSteps(entry, settings, things) {
  if (settings.pool === 'outcome') {
    const { reward, pool } = entry.outcome;
    const total = settings.alpha1 + settings.alpha2;
    return [
      step(
        'Advantage of the answer',
        `(${number(reward)} − ${bracketed(pool.mean)}) / (${number(pool.std)} + 0.0001)`,
        entry.relative,
        `its reward, relative to the ${plural(pool.count, 'answer')} of the group`,
      ),
      step('Advantage', `${number(entry.relative)} · ${number(Math.abs(entry.reward))} / ${number(total)}`, entry.advantage),
    ];
  }
  const { mean: m, std, count } = entry.pool;
  const over = {
    group: `over all ${plural(count, things)} of the group, those of the other outcome counted as 0`,
    joint: `over all ${plural(count, things)} of the group, with signs`,
    sign: `over the ${plural(count, things)} of the same outcome only`,
  }[settings.pool];
  return [
    step('Mean and std', `mean ${number(m)}, std ${number(std)}`, null, over),
    step(
      'Advantage',
      `(${number(entry.reward)} − ${bracketed(m)}) / (${number(std)} + 0.0001)`,
      (entry.reward - m) / (std + STD_EPS),
    ),
  ];
}

function weightSteps(entry, settings, [one, two, H], peers) {
  if (entry.none) return [step('Reward', 'equal to the mean of the group', null, 'so it gets no credit')];
  if (settings.spread !== 'both' && (settings.spread === 'correct') !== entry.correct)
    return [step('Weight', 'not distributed by entropy on this side', 1)];
  const sign = entry.correct ? '' : '−';
  const charge = entry.charge ? [' + charge', ` ${signed(entry.charge)}`] : ['', ''];
  const put = `${sign}(${number(settings.alpha1)} + ${number(settings.alpha2)} · ${number(entry.weight)})${charge[1]}`;
  return [
    step(
      'Entropy',
      H,
      entry.H,
      entry.correct ? 'correct: the higher the entropy, the larger the reward' : 'wrong: the lower the entropy, the larger the penalty',
    ),
    entry.correct ? null : step('Its inverse', `1/${H}`, entry.x),
    step(
      `${settings.average === 'geometric' ? 'Geometric mean' : 'Mean'} of ${entry.correct ? H : `1/${H}`}`,
      `over ${peers}`,
      entry.mean,
    ),
    step(
      'Weight',
      `${number(entry.x)} / ${number(entry.mean)}`,
      entry.weight,
      '1 = the mean of what it is compared with',
    ),
    step('Shaped reward r̃', `${sign}(${one} + ${two} · weight)${charge[0]} = ${put}`, entry.reward),
  ];
}

function gtpoSteps(group, i, t, settings) {
  const entry = gtpo(group, settings)[i][t];
  const side = entry.correct ? 'correct' : 'wrong';
  const peers = {
    column: `the ${plural(entry.peers, `${side} answer`)} still running at position ${t + 1}`,
    row: `the ${plural(entry.peers, 'token')} of this answer`,
    matrix: `the ${plural(entry.peers, 'token')} of all ${side} answers`,
    turn: `the ${plural(entry.peers, 'token')} of this turn in all ${side} answers`,
  }[settings.compare];
  return [entry, [...weightSteps(entry, settings, ['α₁', 'α₂', 'H'], peers), ...poolSteps(entry, settings, 'token')]];
}

function grpoSSteps(group, i, settings) {
  const entry = grpoS(group, settings)[i];
  const peers = `the ${plural(entry.peers, `${entry.correct ? 'correct' : 'wrong'} answer`)} of the group`;
  return [entry, [...weightSteps(entry, settings, ['β₁', 'β₂', 'Ĥ'], peers), ...poolSteps(entry, settings, 'answer')]];
}

function grpoSteps(group, i, t) {
  const entry = grpo(group)[i];
  const { mean: m, std, count } = entry.pool;
  const steps = [
    step('Reward of the answer', 'r', entry.reward, 'the same for each of its tokens'),
    step(
      'Mean and std',
      `mean ${number(m)}, std ${number(std)}`,
      null,
      `over the ${plural(count, 'answer')} of the group`,
    ),
    step('Advantage', `(${number(entry.reward)} − ${bracketed(m)}) / (${number(std)} + 0.0001)`, entry.advantage),
  ];
  const { token_weight: kind, learned_share: share } = group.settings || {};
  if (kind !== 'learned' || !group.answers[i].value) return [entry, steps];
  const { p, P, T, w } = learnedWeight(group.answers[i], t, Math.sign(entry.advantage), share);
  const advantage = entry.advantage * w;
  const formula = `1 + ${number(share)} · (${T} · ${number(p)} − ${number(P)}) / ${number(Math.max(1, P))}`;
  return [
    { ...entry, advantage },
    [
      ...steps,
      step('Change of the prediction', 'p', p, `towards the outcome, by this token; ${number(P)} by all ${T}`),
      step('Weight', formula, w, 'mean 1 over the answer'),
      step('Weighted', `${number(entry.advantage)} · ${number(w)}`, advantage),
    ],
  ];
}

/** Learned credit: what a token moved the predicted outcome towards its answer's own, and its weight. */
function learnedWeight({ value, live }, t, sign, share) {
  const places = value.map((_, k) => k).filter((k) => live[k]);
  const moves = places.map((k, n) => (n + 1 < places.length ? Math.max(0, sign * (value[places[n + 1]] - value[k])) : 0));
  const [p, P, T] = [moves[places.indexOf(t)], moves.reduce((a, b) => a + b, 0), places.length];
  return { p, P, T, w: 1 + (share * (T * p - P)) / Math.max(1, P) };
}

function verdictOn(answer, t, entry) {
  const recorded = answer.advantage ? answer.advantage[t] : null;
  if (recorded === null || recorded === undefined)
    return h('p', { class: 'quiet' }, 'The run recorded no advantage to compare with.');
  const agrees = Math.abs(recorded - entry.advantage) <= 0.01 * Math.max(1, Math.abs(recorded));
  return agrees
    ? h('p', { class: 'agrees' }, `✓ The run trained on ${number(recorded)}.`)
    : h(
        'p',
        { class: 'differs' },
        `The run trained on ${number(recorded)}: it also used data outside this group (the whole batch, a guide), or another rule.`,
      );
}

function derivation(group, i, t) {
  const answer = group.answers[i];
  const head = [
    h('h3', {}, 'How the credit was computed'),
    h(
      'p',
      { class: 'place' },
      h('code', { class: 'token-name' }, brief(answer.tokens[t]).slice(0, 200)),
      onlyText() ? ` answer #${i + 1} ` : ` token ${t + 1} of answer #${i + 1} `,
      outcome(answer),
    ),
    signalTable(answer, t),
  ];
  const sorry = (text) => [...head, h('p', { class: 'quiet' }, text)];
  if (!answer.live[t])
    return sorry('This token does not train: the policy did not sample it (tool output, for example).');
  const method = methodOf(group);
  const shown = method || 'GTPO';
  if (shown !== 'GRPO' && !hasEntropy(group)) return sorry('No entropy was recorded, so the weighting cannot be reproduced.');
  const settings = settingsOf(group);
  const [entry, steps] = {
    GTPO: () => gtpoSteps(group, i, t, settings),
    'GRPO-S': () => grpoSSteps(group, i, settings),
    GRPO: () => grpoSteps(group, i, t),
  }[shown]();
  const own = group.algorithm ? ` (${visible(String(group.algorithm))})` : '';
  return [
    ...head,
    h('h4', {}, method ? `${visible(String(group.algorithm)).toUpperCase()}, step by step` : 'With GTPO'),
    hasSignal(group) || settings.pool === 'outcome' ? h('ol', { class: 'steps' }, steps) : h('ol', { class: 'steps' }, steps.slice(0, -1)),
    !hasSignal(group) &&
      settings.pool !== 'outcome' &&
      h(
        'p',
        {},
        'All answers of this group have the same outcome: there is nothing to compare, so the advantage is 0.',
      ),
    method
      ? verdictOn(answer, t, entry)
      : h('p', { class: 'quiet' }, `The algorithm of the run${own} is unknown to this page.`),
  ];
}
