// Shows code as code: the fenced blocks of an answer, and light colours for Python. Everything becomes text nodes.

import { h } from "./dom.js";

const FENCE = /^[ \t]*```[ \t]*([A-Za-z0-9+#-]{0,20})[ \t]*$/;
const PYTHON = ["", "py", "python", "python3"];
const KEYWORDS = new Set(("and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda "
  + "match None nonlocal not or pass raise return True try while with yield").split(" "));
const TOKEN = /(#[^\n]*)|([rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?))|(\b\d[\w.]*)|([A-Za-z_]\w*)|\s+|[^\s\w]/g;

// Splits a text into parts {text, from, code}: `code` is the language of a fenced block, null for prose.
export function parts(text) {
  const found = [];
  let from = 0; // of the part
  let at = 0; // of the line
  let code = null;
  const end = (to) => {
    if (to > from) found.push({ text: text.slice(from, to), from, code });
  };
  for (const line of text.split("\n")) {
    const fence = line.length < 60 ? line.match(FENCE) : null;
    if (fence && (code === null || fence[1] === "")) {
      end(Math.max(from, code === null ? at : at - 1)); // without the line break before the end of a block
      code = code === null ? fence[1].toLowerCase() : null;
      from = Math.min(at + line.length + 1, text.length);
    }
    at += line.length + 1;
  }
  end(text.length);
  return found;
}

export const hasProgram = (text) => parts(text).some((part) => part.code !== null && part.text.trim());

// Turns a part of a text, which begins at `from`, into nodes; marks the ranges [first, last] that lie in it.
function marked(text, from, ranges, name) {
  const nodes = [];
  let done = 0;
  for (const [first, last, missing] of ranges) {
    if (first === last) { // words are missing behind the one that ends here
      if (first === from ? first > 0 : first < from || first > from + text.length) continue;
    } else if (last <= from + done || first >= from + text.length) continue;
    const start = Math.max(first - from, done);
    const stop = Math.min(last - from, text.length);
    if (start > done) nodes.push(text.slice(done, start));
    nodes.push(first === last ? h("span", { class: "missing", title: `The right answer has “${missing.slice(0, 80)}” here.` }, "‸") : h("mark", {}, text.slice(start, stop)));
    done = stop;
  }
  if (done < text.length) nodes.push(text.slice(done));
  return name ? [h("span", { class: name }, nodes)] : nodes;
}

// Colours Python lightly.
export function python(text, from = 0, ranges = []) {
  const nodes = [];
  let defined = false; // the next name is what `def` or `class` defines
  for (const token of text.matchAll(TOKEN)) {
    const [whole, comment, string, number, word] = token;
    const name = comment ? "comment" : string ? "string" : number ? "literal" : word ? (defined ? "defined" : KEYWORDS.has(word) ? "keyword" : null) : null;
    if (word || !/^\s+$/.test(whole)) defined = word === "def" || word === "class";
    nodes.push(...marked(whole, from + token.index, ranges.filter(([first, last]) => last >= from + token.index && first <= from + token.index + whole.length), name));
  }
  return nodes;
}

// A text with its fenced blocks as code, and with some ranges marked.
export function shown(text, ranges = []) {
  const found = parts(text);
  const within = ({ text: part, from }) => ranges.filter(([first, last]) => last >= from && first <= from + part.length);
  if (!found.some((part) => part.code !== null)) return h("pre", {}, marked(text, 0, ranges));
  return h("div", { class: "mixed" }, found.map((part) => {
    if (part.code === null) {
      const blank = part.text.match(/^\n*/)[0].length;
      return part.text.trim() ? h("pre", {}, marked(part.text.slice(blank).trimEnd(), part.from + blank, within(part))) : null;
    }
    return h("pre", { class: "code" }, PYTHON.includes(part.code) ? python(part.text, part.from, within(part)) : marked(part.text, part.from, within(part)));
  }));
}
