// How the credit was made: the formula of one token with its numbers put in.

const bracketed = (x) => (x < 0 ? `(${number(x)})` : number(x));

const step = (name, formula, value, note) =>
  h(
    'li',
    h('span.step-name', name),
    h('span.formula', formula, value !== null && [' = ', h('b', number(value))]),
    note && quiet(note),
  );

const poolStep = ({ mean: m, std }, note) => step('Mean and std', `mean ${number(m)}, std ${number(std)}`, null, note);

const standardStep = (name, reward, pool, note) => {
  const formula = `(${number(reward)} − ${bracketed(pool.mean)}) / (${number(pool.std)} + 0.0001)`;
  return step(name, formula, standardised(reward, pool), note);
};

function signalTable(answer, t) {
  const names = Object.keys(SIGNALS).filter((name) => answer[name] && answer[name][t] !== null);
  return table('signals', null, names.map((name) => [SIGNALS[name].label, number(answer[name][t])]));
}

function poolSteps(entry, settings, things) {
  if (settings.pool === 'outcome') {
    const { reward, pool } = entry.outcome;
    const over = `its reward, relative to the ${plural(pool.count, 'answer')} of the group`;
    const share = `${number(Math.abs(entry.reward))} / ${number(settings.alpha1 + settings.alpha2)}`;
    return [
      standardStep('Advantage of the answer', reward, pool, over),
      step('Advantage', `${number(entry.relative)} · ${share}`, entry.advantage),
    ];
  }
  const count = plural(entry.pool.count, things);
  const over = {
    group: `over all ${count} of the group, those of the other outcome counted as 0`,
    joint: `over all ${count} of the group, with signs`,
    sign: `over the ${count} of the same outcome only`,
  }[settings.pool];
  return [poolStep(entry.pool, over), standardStep('Advantage', entry.reward, entry.pool)];
}

function weightSteps(entry, settings, [one, two, H], peers) {
  if (entry.none) return [step('Reward', 'equal to the mean of the group', null, 'so it gets no credit')];
  if (settings.spread !== 'both' && (settings.spread === 'correct') !== entry.correct)
    return [step('Weight', 'not distributed by entropy on this side', 1)];
  const [sign, x, why] = entry.correct
    ? ['', H, 'correct: the higher the entropy, the larger the reward']
    : ['−', `1/${H}`, 'wrong: the lower the entropy, the larger the penalty'];
  const charge = entry.charge ? [' + charge', ` ${signed(entry.charge)}`] : ['', ''];
  const put = `${sign}(${number(settings.alpha1)} + ${number(settings.alpha2)} · ${number(entry.weight)})${charge[1]}`;
  const average = settings.average === 'geometric' ? 'Geometric mean' : 'Mean';
  const ratio = `${number(entry.x)} / ${number(entry.mean)}`;
  return [
    step('Entropy', H, entry.H, why),
    !entry.correct && step('Its inverse', x, entry.x),
    step(`${average} of ${x}`, `over ${peers}`, entry.mean),
    step('Weight', ratio, entry.weight, '1 = the mean of what it is compared with'),
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
  const steps = [
    step('Reward of the answer', 'r', entry.reward, 'the same for each of its tokens'),
    poolStep(entry.pool, `over the ${plural(entry.pool.count, 'answer')} of the group`),
    standardStep('Advantage', entry.reward, entry.pool),
  ];
  const { token_weight: kind, learned_share: share } = group.settings || {};
  if (kind !== 'learned' || !group.answers[i].value) return [entry, steps];
  const { p, P, T, w } = learnedWeight(group.answers[i], t, Math.sign(entry.advantage), share);
  const advantage = entry.advantage * w;
  const formula = `1 + ${number(share)} · (${T} · ${number(p)} − ${number(P)}) / ${number(Math.max(1, P))}`;
  steps.push(
    step('Change of the prediction', 'p', p, `towards the outcome, by this token; ${number(P)} by all ${T}`),
    step('Weight', formula, w, 'mean 1 over the answer'),
    step('Weighted', `${number(entry.advantage)} · ${number(w)}`, advantage),
  );
  return [{ ...entry, advantage }, steps];
}

/** Learned credit: what a token moved the predicted outcome towards its answer's own, and its weight. */
function learnedWeight({ value, live }, t, sign, share) {
  const places = value.map((_, k) => k).filter((k) => live[k]);
  const moves = places.slice(1).map((next, n) => Math.max(0, sign * (value[next] - value[places[n]])));
  moves.push(0); // the last token moves nothing
  const [p, P, T] = [moves[places.indexOf(t)], sum(moves), places.length];
  return { p, P, T, w: 1 + (share * (T * p - P)) / Math.max(1, P) };
}

function verdictOn(answer, t, entry) {
  const recorded = answer.advantage?.[t];
  if (!isKnown(recorded)) return h('p.quiet', 'The run recorded no advantage to compare with.');
  if (Math.abs(recorded - entry.advantage) <= 0.01 * Math.max(1, Math.abs(recorded)))
    return h('p.agrees', `✓ The run trained on ${number(recorded)}.`);
  const why = 'it also used data outside this group (the whole batch, a guide), or another rule.';
  return h('p.differs', `The run trained on ${number(recorded)}: ${why}`);
}

function derivation(group, i, t) {
  const answer = group.answers[i];
  const place = onlyText() ? ` answer #${i + 1} ` : ` token ${t + 1} of answer #${i + 1} `;
  const head = [
    h('h3', 'How the credit was computed'),
    h('p.place', h('code.token-name', brief(answer.tokens[t]).slice(0, 200)), place, outcome(answer)),
    signalTable(answer, t),
  ];
  const sorry = (text) => [head, h('p.quiet', text)];
  if (!answer.live[t])
    return sorry('This token does not train: the policy did not sample it (tool output, for example).');
  const method = methodOf(group);
  const shown = method || 'GTPO';
  if (shown !== 'GRPO' && !hasEntropy(group))
    return sorry('No entropy was recorded, so the weighting cannot be reproduced.');
  const settings = settingsOf(group);
  const [entry, steps] = {
    GTPO: () => gtpoSteps(group, i, t, settings),
    'GRPO-S': () => grpoSSteps(group, i, settings),
    GRPO: () => grpoSteps(group, i, t),
  }[shown]();
  const name = visible(String(group.algorithm || ''));
  const even = !hasSignal(group) && settings.pool !== 'outcome';
  return [
    head,
    h('h4', method ? `${name.toUpperCase()}, step by step` : 'With GTPO'),
    h('ol.steps', even ? steps.slice(0, -1) : steps),
    even &&
      h('p', 'All answers of this group have the same outcome: there is nothing to compare, so the advantage is 0.'),
    method
      ? verdictOn(answer, t, entry)
      : h('p.quiet', `The algorithm of the run${name && ` (${name})`} is unknown to this page.`),
  ];
}
