// The rows of one page as a tree grid: arrows move, Enter or a click chooses, Right and Left unfold and fold.
const HEAD = ["position", "id", "text", "role", "source", "seconds"];

function cell(row, text, name) {
  const td = document.createElement("td");
  td.setAttribute("role", "gridcell");
  if (name) td.className = name;
  td.textContent = text;
  row.append(td);
  return td;
}

function fill(row, data) {
  row.className = `audiollm-row role-${data.role}${data.selected ? " selected" : ""}`;
  row.setAttribute("role", "row");
  row.setAttribute("aria-selected", String(data.selected));
  row.setAttribute("aria-level", data.inner ? "2" : "1");
  row.setAttribute("aria-label", data.label);
  if (data.open !== null) row.setAttribute("aria-expanded", String(data.open));
  const place = cell(row, data.place);
  if (data.open !== null) {
    const fold = document.createElement("span");
    fold.className = "fold";
    fold.setAttribute("aria-hidden", "true");
    fold.textContent = data.open ? "▾ " : "▸ ";
    place.prepend(fold);
  }
  cell(row, data.id);
  cell(row, data.text, "text");
  cell(row, data.role);
  cell(row, data.source);
  cell(row, data.seconds);
}

function render({ model, el }) {
  const table = document.createElement("table");
  table.className = "audiollm-tokens";
  table.setAttribute("role", "treegrid");
  const head = table.createTHead().insertRow();
  head.setAttribute("role", "row");
  for (const name of HEAD) {
    const th = document.createElement("th");
    th.setAttribute("role", "columnheader");
    th.textContent = name;
    head.append(th);
  }
  const body = table.createTBody();
  const box = document.createElement("div");
  box.className = "audiollm-token-box";
  box.append(table);
  el.append(box);
  let active = 0;

  const say = (event, k) => model.send({ event, first: model.get("rows")[k].first, inner: model.get("rows")[k].inner });
  const focus = (k, really = true) => {
    const rows = body.rows;
    if (!rows.length) return;
    active = Math.min(Math.max(k, 0), rows.length - 1);
    for (const [i, row] of [...rows].entries()) row.tabIndex = i === active ? 0 : -1;
    if (really) rows[active].focus();
  };
  const draw = () => {
    const had = body.contains(document.activeElement);
    const rows = model.get("rows");
    table.setAttribute("aria-label", model.get("label"));
    body.replaceChildren(...rows.map((data, k) => {
      const row = document.createElement("tr");
      fill(row, data);
      row.addEventListener("click", (event) => {
        focus(k);
        say(event.target.closest(".fold") ? "fold" : "choose", k);
      });
      return row;
    }));
    focus(active, had);
    const chosen = rows.findIndex((data) => data.selected);
    if (chosen >= 0 && !had) box.scrollTop = Math.max(0, body.rows[chosen].offsetTop - box.clientHeight / 3);
  };
  const onKey = (event) => {
    const rows = model.get("rows");
    if (event.ctrlKey || event.metaKey || event.altKey || event.key === "Tab") return;
    event.stopPropagation();  // whatever it is, it is not the notebook's
    if (!rows.length) return;
    const row = rows[active];
    const acts = {
      ArrowDown: () => focus(active + 1),
      ArrowUp: () => focus(active - 1),
      Home: () => focus(0),
      End: () => focus(rows.length - 1),
      PageDown: () => focus(active + 15),
      PageUp: () => focus(active - 15),
      Enter: () => say("choose", active),
      " ": () => say("choose", active),
      ArrowRight: () => row.open === false && say("fold", active),
      ArrowLeft: () => (row.open === true || row.inner) && say("fold", active),
      Escape: () => model.send({ event: "clear" }),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  table.addEventListener("keydown", onKey);
  model.on("change:rows", draw);
  model.on("change:label", draw);
  draw();
  return () => { model.off("change:rows", draw); model.off("change:label", draw); };
}

export default { render };
