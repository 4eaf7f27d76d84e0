// Shows openapi.json as a page.

/** An element with children. */
function element(name, kind, ...children) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

function operation(path, method, described) {
  const answers = Object.entries(described.responses)
    .map(([status, answer]) => element("tr", "", element("th", "", status), element("td", "", answer.description)));
  const parts = [
    element("summary", "", element("span", "method", method.toUpperCase()), element("code", "", path), ` ${described.summary}`),
  ];
  const inner = element("div", "scroll");
  const example = described.requestBody?.content?.["application/json"]?.example;
  if (example !== undefined) inner.append(element("pre", "", JSON.stringify(example, null, 2)));
  inner.append(element("table", "", element("tbody", "", ...answers)));
  return element("details", "operation", ...parts, inner);
}

const description = await (await fetch("/openapi.json")).json();
const operations = Object.entries(description.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, described]) => operation(path, method, described)));
document.getElementById("description").textContent = description.info.description;
document.getElementById("main").append(...operations);
