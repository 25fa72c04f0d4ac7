// Text as it is: what has no shape of its own, or would reorder its neighbours, is shown by name.

const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

const named = (character) => `⟨U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`;
const visible = (text) => text.replace(UNSEEN, named);

const MARKUP = /<\|[^|<>]{1,40}\|>|<\/?s>|<(?:bos|eos|pad|start_of_turn|end_of_turn)>|\[\/?INST\]|<<\/?SYS>>/g;
const isMarkup = (text) => /[<[]/.test(text) && !plain(text) && text.trim() !== '';
const plain = (text) => text.replace(MARKUP, ' ').trim();

/** A prompt in turns: [{role, text}]. Without chat markup, one turn without a role. */
function turnsOf(prompt) {
  const parts = prompt.split(MARKUP).filter((text) => text.trim());
  if (!prompt.match(MARKUP)) return parts.map((text) => ({ role: null, text }));
  const role = /^\s*(system|user|assistant|model|tool)\b[:\n]*/;
  return parts
    .map((text) => ({ role: text.match(role)?.[1], text: text.replace(role, '').trim() }))
    .filter(({ text }) => text);
}

/** Text with the words of the search marked. */
function marked(text) {
  const wanted = state.q.trim().toLowerCase();
  if (!wanted) return [text];
  const parts = [];
  let from = 0;
  for (let at = text.toLowerCase().indexOf(wanted); at >= 0; at = text.toLowerCase().indexOf(wanted, from)) {
    parts.push(text.slice(from, at), h('mark', text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}

/** Which tokens the words of the search touch. */
function tokensFound(tokens) {
  const wanted = state.q.trim().toLowerCase();
  const found = new Set();
  if (!wanted) return found;
  const starts = [];
  let text = '';
  for (const token of tokens) {
    starts.push(text.length);
    text += token.toLowerCase();
  }
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1))
    starts.forEach((start, t) => {
      if (start < at + wanted.length && start + tokens[t].length > at) found.add(t);
    });
  return found;
}

/** A token on one line: line breaks and tabs as signs. */
const brief = (text) => visible(text).replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/ /g, '·') || '∅';

/** A token in running text: a line break shows its sign and still breaks the line. */
const running = (text) => visible(text).replace(/\n/g, '⏎\n');
