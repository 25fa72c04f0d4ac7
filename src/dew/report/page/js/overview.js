// What was run, what came of it, and what to worry about.

const ends = (values) => {
  const known = (values || []).filter((v) => v !== null);
  const tenth = Math.max(1, Math.round(known.length / 10));
  return known.length ? [mean(known.slice(0, tenth)), mean(known.slice(-tenth)), known.length] : null;
};

function tile(label, main, note) {
  return h(
    'div',
    { class: 'tile' },
    h('span', { class: 'tile-label' }, label),
    h('span', { class: 'tile-main' }, main),
    note && h('span', { class: 'tile-note' }, note),
  );
}

function tiles(run) {
  const change = (label, name, show = number) => {
    const pair = ends(run.metrics[name]);
    return (
      pair &&
      tile(
        label,
        pair[2] > 1 ? `${show(pair[0])} → ${show(pair[1])}` : show(pair[1]),
        pair[2] > 1 ? 'first to last tenth of the run' : null,
      )
    );
  };
  const steps = run.metrics.step || [];
  const kept = ends(run.metrics['groups/mixed_share']);
  return h(
    'div',
    { class: 'tiles' },
    steps.length ? tile('Steps', whole(steps[steps.length - 1]), run.facts.status || null) : null,
    change('Reward', 'reward', (x) => x.toFixed(3)),
    change('Entropy', 'entropy', (x) => x.toFixed(3)),
    change('Tokens per answer', 'length/mean', whole),
    kept && tile('Groups with signal', percent(kept[1]), 'with correct and wrong answers, last tenth'),
    run.groups.length ? tile('Recorded groups', whole(run.groups.length), sampled(run)) : null,
  );
}

function sampled(run) {
  const { groups, of, files, files_of: filesOf } = run.sample;
  if (files < filesOf) return `a sample: ${whole(files)} of ${whole(filesOf)} recorded steps`;
  return groups < of ? `a sample: ${whole(groups)} of ${whole(of)}` : 'all recorded groups';
}

const spoken = (name) => visible(String(name || 'alarm')).replace(/_/g, ' ');

function warningCard(kind, sign, title, text, remedy) {
  const todo = remedy && h('p', { class: 'remedy' }, h('b', {}, 'Remedy: '), visible(String(remedy)));
  return h(
    'li',
    { class: `warning ${kind}` },
    h('span', { class: 'warning-sign', 'aria-hidden': 'true' }, sign),
    h('div', {}, h('strong', {}, title), h('p', {}, visible(String(text || ''))), todo),
  );
}

/** One card per alarm, with how often it fired and when last. */
function alarmCards(alarms) {
  const byName = new Map();
  for (const alarm of alarms) byName.set(alarm.alarm, [...(byName.get(alarm.alarm) || []), alarm]);
  return [...byName.values()].map((same) => {
    const again =
      same.length > 1
        ? `, and ${same.length - 1} more ${same.length > 2 ? 'times' : 'time'}, last at step ${same[same.length - 1].step}`
        : '';
    return warningCard(
      'alarm',
      '▲',
      `${spoken(same[0].alarm)} · step ${same[0].step}${again}`,
      same[0].message,
      same[0].remedy,
    );
  });
}

function warnings(run) {
  const since = (remark) => (remark.step === undefined ? '' : ` from step ${remark.step}`);
  const items = [
    ...run.notices.map((text) => warningCard('notice', '!', 'Note', text)),
    ...alarmCards(run.alarms),
    ...run.remarks.map((r) =>
      warningCard('remark', '●', `${spoken(r.alarm)} · found in the curves${since(r)}`, r.message, r.remedy),
    ),
  ];
  if (items.length) return h('ul', { class: 'warnings' }, items);
  return h(
    'p',
    { class: 'calm' },
    run.metrics.step
      ? '✓ No alarms, and nothing unusual in the curves.'
      : 'No metrics were recorded, so alarms cannot be checked.',
  );
}

/** Before and after on one line from 0 to 100 %, intervals as bars: hollow before, solid after. */
function scorePlot(rows) {
  const x = (v) => 8 + 284 * Math.min(1, Math.max(0, v));
  return s(
    'svg',
    { viewBox: `0 0 300 ${22 * rows.length + 4}`, class: 'scores-plot', 'aria-hidden': 'true' },
    [0, 0.25, 0.5, 0.75, 1].map((v) =>
      s('line', { x1: x(v), x2: x(v), y1: 0, y2: 22 * rows.length + 4, class: 'grid' }),
    ),
    rows.map(({ when, score }, i) => {
      const y = 13 + 22 * i;
      const known = typeof score.low === 'number' && typeof score.high === 'number';
      return s(
        'g',
        { class: when },
        known && s('line', { x1: x(score.low), x2: x(score.high), y1: y, y2: y, class: 'interval' }),
        s('circle', { cx: x(score.value), cy: y, r: 5 }),
      );
    }),
  );
}

function scores(run) {
  const rows = new Map();
  for (const entry of run.scores) {
    for (const [name, score] of Object.entries(entry.scores || {})) {
      const key = `${entry.task}\n${name}`;
      if (!rows.has(key)) rows.set(key, { task: entry.task, name, n: entry.n_problems, k: entry.k, found: [] });
      rows.get(key).found.push({ when: entry.when === 'before' ? 'before' : 'after', score });
    }
  }
  if (!rows.size) return null;
  const said = ({ when, score }) =>
    h(
      'div',
      { class: `said ${when}` },
      `${when} `,
      h('b', {}, percent(score.value, 1)),
      typeof score.low === 'number'
        ? h('span', { class: 'quiet' }, ` [${percent(score.low, 1)}, ${percent(score.high, 1)}]`)
        : null,
    );
  return h(
    'section',
    {},
    h('h3', {}, 'Scores before and after'),
    h(
      'div',
      { class: 'scores' },
      [...rows.values()].map((row) =>
        h(
          'div',
          { class: 'score' },
          h(
            'div',
            {},
            h('strong', {}, `${visible(String(row.task))} · ${row.name}`),
            h('div', { class: 'quiet' }, `${plural(row.n || 0, 'problem')}${row.k ? ` × ${row.k} answers` : ''}`),
          ),
          scorePlot(row.found),
          h('div', {}, row.found.map(said)),
        ),
      ),
    ),
    h(
      'p',
      { class: 'quiet' },
      '○ before, ● after; bars are the 95 % intervals of the evaluation. The axis runs from 0 to 100 %.',
    ),
  );
}

function said(value) {
  if (value === null || value === undefined || value === '') return '–';
  if (Array.isArray(value)) return value.map(said).join(', ');
  if (typeof value === 'object')
    return (
      Object.entries(value)
        .map(([k, v]) => `${k} ${said(v)}`)
        .join(' · ') || '–'
    );
  return visible(String(value));
}

function facts(runs) {
  const hidden = new Set(['schema', 'name']);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.facts)))].filter((name) => !hidden.has(name));
  const value = (run, name) => {
    if (name !== 'algorithm' || typeof run.facts.algorithm !== 'object') return said(run.facts[name]);
    return [
      String(run.facts.algorithm.name),
      run.facts.algorithm.settings && h('div', { class: 'quiet' }, said(run.facts.algorithm.settings)),
    ];
  };
  if (!names.length) return null;
  return h(
    'section',
    {},
    h('h3', {}, 'Run'),
    h(
      'div',
      { class: 'scroll-x' },
      h(
        'table',
        { class: 'facts' },
        runs.length > 1 &&
          h(
            'thead',
            {},
            h(
              'tr',
              {},
              h('th', {}),
              runs.map((run, r) => h('th', { scope: 'col' }, runMark(r), visible(run.name))),
            ),
          ),
        h(
          'tbody',
          {},
          names.map((name) =>
            h(
              'tr',
              {},
              h('th', { scope: 'row' }, name.replace(/_/g, ' ')),
              runs.map((run) => h('td', {}, value(run, name))),
            ),
          ),
        ),
      ),
    ),
  );
}

function overview(report) {
  return h(
    'div',
    { class: 'page' },
    report.runs.map((run, r) =>
      h(
        'section',
        { class: 'run' },
        h('h2', {}, report.runs.length > 1 && runMark(r), visible(run.name)),
        tiles(run),
        warnings(run),
        scores(run),
        run.config &&
          h(
            'details',
            {},
            h('summary', {}, 'Configuration (config.yaml)'),
            h('pre', { class: 'config' }, visible(run.config)),
          ),
      ),
    ),
    facts(report.runs),
    h(
      'p',
      { class: 'quiet' },
      `Made ${report.made} by dew ${report.dew}. This file is self-contained: it works offline and makes no network requests.`,
    ),
  );
}
