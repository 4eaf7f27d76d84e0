// Draws the diagrams of a page with mermaid.js, which `make site` puts beside the pages. Without it they stay text.
(() => {
  const diagrams = document.querySelectorAll("pre.mermaid");
  if (diagrams.length === 0) return;
  const dark = /navy|coal|ayu/.test(document.documentElement.className);
  const script = document.createElement("script");
  script.src = `${path_to_root}mermaid.min.js`;
  script.onload = () => {
    mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral" });
    mermaid.run({ nodes: diagrams });
  };
  document.head.append(script);
})();
