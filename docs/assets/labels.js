/* The theme's scripts wrap tables, and add a bar to each block of code: a keyboard must reach them, and they need names. */
const label = () => {
  const scrolled = ".md-typeset__scrollwrap:not([tabindex]), .md-typeset p:has(> img[src*='pictures/']):not([tabindex])";
  document.querySelectorAll(scrolled).forEach((part) => { part.tabIndex = 0; });
  document.querySelectorAll(".md-code__nav").forEach((bar, n) => {
    const name = `Code block ${n + 1}`;
    if (bar.ariaLabel !== name) bar.ariaLabel = name;
  });
};
new MutationObserver(label).observe(document.body, { childList: true, subtree: true });
label();
