// Names the controls of the panel it lies in, and tells the kernel which theme the page has.
const CONTROLS = "input, select, textarea, button, [role=slider], [role=group], [role=progressbar]";

function nameOf(control) {
  const box = control.closest(".jupyter-widgets");
  const label = box?.querySelector(".widget-label")?.innerText.trim();
  const title = control.title || box?.title || "";
  return label || title.trim();
}

function nameAll(panel) {
  for (const control of panel.querySelectorAll(CONTROLS)) {
    if (control.getAttribute("aria-label") || control.labels?.length || control.closest("[data-named]")) continue;
    const text = control.innerText?.trim();
    const name = nameOf(control);
    if (name && !(control.tagName === "BUTTON" && text)) control.setAttribute("aria-label", name);
  }
  for (const group of panel.querySelectorAll(".widget-toggle-buttons, .widget-radio-box, .widget-selectmultiple")) {
    if (!group.getAttribute("role")) group.setAttribute("role", "group");
    const name = nameOf(group);
    if (name && !group.getAttribute("aria-label")) group.setAttribute("aria-label", name);
  }
}

const isDark = () => document.body.dataset.jpThemeLight === "false";

function render({ model, el, signal }) {
  el.style.display = "none";
  const tell = () => {
    if (model.get("dark") === isDark()) return;
    model.set("dark", isDark());
    model.save_changes();
  };
  const theme = new MutationObserver(tell);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  let panel = null, names = null, waiting = 0;
  const start = () => {
    panel = el.closest(".audiollm-panel");
    if (!panel) { waiting = requestAnimationFrame(start); return; }
    nameAll(panel);
    let due = false;
    names = new MutationObserver(() => {
      if (due) return;
      due = true;
      requestAnimationFrame(() => { due = false; nameAll(panel); });
    });
    names.observe(panel, { childList: true, subtree: true });
  };
  start();
  tell();
  return () => { theme.disconnect(); names?.disconnect(); cancelAnimationFrame(waiting); };
}

export default { render };
