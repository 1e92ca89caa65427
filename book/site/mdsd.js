// Small repairs of the theme for readers who use a keyboard or a screen reader.

// A box that scrolls must be reachable by the keyboard; one that fits must not be a stop on the way.
function markScrolling() {
  for (const box of document.querySelectorAll('mjx-container[display="true"]')) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

// The visible words of these controls name them; the theme's labels said something else.
function trustVisibleNames() {
  for (const control of document.querySelectorAll("summary[aria-label], .search-button-field")) {
    control.removeAttribute("aria-label");
  }
  // Before Font Awesome sees the icons: it would turn the title into a second name.
  for (const icon of document.querySelectorAll(".theme-switch")) icon.removeAttribute("title");
  // Docutils gives the bibliography roles that exclude the links inside.
  for (const entry of document.querySelectorAll(".citation-list, .citation")) {
    entry.removeAttribute("role");
  }
}

// The first change of state comes when the page is parsed and no deferred script has run yet.
document.addEventListener("readystatechange", trustVisibleNames, { once: true });
window.addEventListener("load", () => window.MathJax?.startup?.promise?.then(markScrolling));
window.addEventListener("resize", markScrolling);
