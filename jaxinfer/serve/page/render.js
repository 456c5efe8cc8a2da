// A model's text as elements: fenced code, inline code, bold and lists; the rest stays as it was written.

import { element } from "./dom.js";

const FENCE = /^ {0,3}```([\w+#.-]*)\s*$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

export function render(text) {
  const blocks = [];
  let lines = [];
  let code = null;
  const flush = () => {
    const paragraph = lines.join("\n").replace(/^\n+|\s+$/g, "");
    if (paragraph) blocks.push(element("p", {}, ...inline(paragraph)));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    if (fence && code === null) {
      flush();
      code = { language: fence[1], lines: [] };
    } else if (fence && !fence[1]) {
      blocks.push(codeBlock(code));
      code = null;
    } else {
      (code ? code.lines : lines).push(line);
    }
  }
  if (code) blocks.push(codeBlock(code));
  flush();
  return blocks;
}

function inline(text) {
  return text.split(INLINE).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return element("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return element("strong", {}, part.slice(2, -2));
    return part;
  });
}

function codeBlock({ language, lines }) {
  const text = lines.join("\n");
  const copy = element("button", { type: "button", className: "link" }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  const head = element("div", { className: "code-head" }, element("span", {}, language || "text"), copy);
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, element("code", {}, text)));
}

export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copying is not allowed here";
  }
  setTimeout(() => (button.textContent = label), 1500);
}
