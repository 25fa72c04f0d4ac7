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

/** The words of the search as a pattern; without any, one that matches nothing. */
function searched() {
  const words = state.q.trim();
  return words ? new RegExp(`(${words.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')})`, 'gi') : /(?!)/g;
}

/** Text with the words of the search marked. */
const marked = (text) => text.split(searched()).map((part, k) => (k % 2 ? h('mark', part) : part));

/** A test for the tokens that the words of the search touch. */
function tokensFound(tokens) {
  if (!state.q.trim()) return () => false;
  const hits = [...tokens.join('').matchAll(searched())];
  let to = 0;
  const touched = tokens.map((token) => {
    const from = to;
    to += token.length;
    return hits.some(({ 0: hit, index }) => from < index + hit.length && to > index);
  });
  return (t) => touched[t];
}

/** A token on one line: line breaks and tabs as signs. */
const brief = (text) => visible(text).replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/ /g, '·') || '∅';

/** A token in running text: a line break shows its sign and still breaks the line. */
const running = (text) => (/^[ -~]+$/.test(text) ? text : visible(text).replace(/\n/g, '⏎\n') || '∅');
