"use strict";
// The page of a report: one token is chosen, and its waterfall and its layers are drawn from the arrays in #data.
// Text reaches the page as text nodes only; what Plotly would take for markup is escaped.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const KINDS = { f64: Float64Array, f32: Float32Array, i32: Int32Array, u16: Uint16Array };

  // An array of the data as a function from a token to its slice.
  function decode(packed) {
    if (!packed) return null;
    const kind = Object.keys(KINDS).find((name) => name in packed);
    const bytes = Uint8Array.from(atob(packed[kind]), (character) => character.charCodeAt(0));
    const numbers = new KINDS[kind](bytes.buffer);
    const stride = packed.shape.slice(1).reduce((product, size) => product * size, 1);
    return (token) => numbers.subarray(token * stride, (token + 1) * stride);
  }

  const credits = decode(data.credits);
  const values = decode(data.values);
  const total = decode(data.total);
  const gap = decode(data.gap);
  const rules = data.onsets.map((rule) => ({ ...rule, ends: decode(rule.ends) }));
  const methods = data.methods.map((method) => ({
    ...method,
    amounts: decode(method.amounts),
    under: Object.fromEntries(Object.entries(method.under).map(([name, packed]) => [name, decode(packed)])),
  }));
  const lens = data.lens && {
    ...data.lens,
    prob: decode(data.lens.prob),
    rank: decode(data.lens.rank),
    top: decode(data.lens.top),
    probs: decode(data.lens.top_probs),
    k: data.lens.top.shape[2],
  };
  const buttons = [...document.querySelectorAll(".token")];
  const ofToken = new Map(buttons.map((button) => [Number(button.dataset.entry), button]));
  const order = buttons.map((button) => Number(button.dataset.entry));
  const chosen = { token: order[0], rule: rules.findIndex((rule) => rule.known) };

  // --- writing --------------------------------------------------------------------------------------------------

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const minus = (text) => text.replaceAll("-", "\u2212");

  // A number of a column whose largest is `scale`: four decimals, or an exponent where four decimals would show little.
  function cell(value, scale, sign) {
    if (Number.isNaN(value)) return "\u2013";
    const small = scale > 0 && scale < 0.005;
    if (Math.abs(value) < 5e-5 * (small ? scale : 1)) return "\u00b7";
    return (sign && value > 0 ? "+" : "") + minus(small ? exponent(value, 1) : value.toFixed(4));
  }

  const exponent = (value, digits) => value.toExponential(digits).replace(/e([+-])(\d)$/, "e$10$2");
  const error = (value) => (value === 0 ? "0" : minus(exponent(value, 0)));

  function plain(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    return minus(size < 5e-5 ? exponent(value, 1) : value.toFixed(size < 10 ? 4 : 2));
  }

  const signed = (value) => (value > 0 ? "+" : "") + plain(value);
  const precise = (value) => minus(String(Number(value.toPrecision(6))));
  const escaped = (text) => text.replace(/[&<>$]/g, (character) => `&#${character.charCodeAt(0)};`);

  // --- the strip ------------------------------------------------------------------------------------------------

  const isDark = () => document.documentElement.dataset.theme === "dark";

  function range(ends) {
    const found = ends.filter((end) => end >= 0);
    return [Math.min(...found), Math.max(...found)];
  }

  function depth(end, [first, last]) {
    return last > first ? (100 * (end - first)) / (last - first) : 60;
  }

  function paint(node, end, span) {
    const share = end < 0 ? 0 : depth(end, span);
    node.style.setProperty("--depth", `${share.toFixed(1)}%`);
    node.classList.toggle("deep", share > (isDark() ? 51 : 87)); // where the other colour of text has the better contrast
    node.classList.toggle("none", end < 0);
  }

  function colour() {
    const rule = rules[chosen.rule];
    const ends = order.map((token) => rule.ends(token)[0]);
    const span = range(ends);
    order.forEach((token, place) => {
      const { target, where } = data.tokens[token];
      const words = `${target}, ${where}; onset ${rule.labels[token]} (${rule.rule})`;
      ofToken.get(token).setAttribute("aria-label", words);
      ofToken.get(token).title = words;
      paint(ofToken.get(token), ends[place], span);
    });
    byId("rule-words").textContent = `${rule.rule}: ${rule.words}.`;
    drawLegend(ends, span);
  }

  // How many tokens have their onset with each segment, as columns in the colours of the tokens.
  function drawLegend(ends, span) {
    const counts = data.states.map((_, state) => ends.filter((end) => end === state).length);
    const none = ends.filter((end) => end < 0).length;
    const most = Math.max(1, none, ...counts);
    const every = Math.ceil(data.segments.length / 8);
    const columns = data.segments.map((name, segment) =>
      legendColumn(name, counts[segment + 1], segment + 1, most, span, segment % every === 0),
    );
    if (counts[0]) columns.unshift(legendColumn(data.states[0], counts[0], 0, most, span, true));
    if (none) columns.push(element("div", {}), legendColumn("none", none, -1, most, span, true));
    const words = columns.map((column) => column.title).filter(Boolean);
    byId("legend").replaceChildren(...columns);
    byId("legend").setAttribute("aria-label", `number of tokens by onset: ${words.join(", ")}`);
  }

  function legendColumn(name, count, end, most, span, labelled) {
    const bar = element("i", { style: `height:${(100 * count) / most}%` });
    paint(bar, end, span);
    const column = element("div", {}, element("div", {}, ...(count ? [bar] : [])), element("span", {}, labelled ? name : ""));
    if (count) column.title = `${name}: ${count}`;
    return column;
  }

  function choose(token, focus) {
    const before = ofToken.get(chosen.token);
    before.setAttribute("aria-pressed", "false");
    before.tabIndex = -1;
    chosen.token = token;
    const now = ofToken.get(token);
    now.setAttribute("aria-pressed", "true");
    now.tabIndex = 0;
    if (focus) now.focus({ preventScroll: true });
    scrollTo(now);
    soon();
  }

  function scrollTo(button) {
    const strip = button.closest(".strip");
    const [inner, outer] = [button.getBoundingClientRect(), strip.getBoundingClientRect()];
    if (inner.top < outer.top) strip.scrollTop -= outer.top - inner.top + 12;
    if (inner.bottom > outer.bottom) strip.scrollTop += inner.bottom - outer.bottom + 12;
  }

  // The token in the line above or below that is nearest; lines are told apart by their middles.
  function vertical(step) {
    const from = ofToken.get(chosen.token).getBoundingClientRect();
    const middle = (box) => (box.top + box.bottom) / 2;
    let best = null;
    for (const token of order) {
      const box = ofToken.get(token).getBoundingClientRect();
      const down = step * (middle(box) - middle(from));
      if (down < from.height / 2) continue;
      const cost = 1000 * Math.round(down / 8) + Math.abs(box.left - from.left);
      if (best === null || cost < best.cost) best = { token, cost };
    }
    return best === null ? chosen.token : best.token;
  }

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const place = order.indexOf(chosen.token);
    const moves = {
      ArrowRight: () => order[Math.min(place + 1, order.length - 1)],
      ArrowLeft: () => order[Math.max(place - 1, 0)],
      ArrowDown: () => vertical(1),
      ArrowUp: () => vertical(-1),
      Home: () => order[0],
      End: () => order[order.length - 1],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    choose(moves[event.key](), true);
  }

  // --- one token ------------------------------------------------------------------------------------------------

  let waiting = false;

  function soon() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawToken();
    });
  }

  function drawToken() {
    const who = data.tokens[chosen.token];
    byId("detail-heading").textContent = who.target;
    const ids = who.ids.length === 1 ? `id ${who.ids[0]}` : `ids ${who.ids.join(", ")}`;
    byId("detail-where").textContent = `${ids}, ${who.where}`;
    drawSums(who);
    drawOnsets();
    drawWaterfall(who);
    drawLayers(who);
  }

  function row(name, value, attributes) {
    return element("tr", attributes, element("th", { scope: "row" }, name), element("td", {}, ...[value].flat()));
  }

  function drawSums(who) {
    const own = values(chosen.token);
    const sum = credits(chosen.token).reduce((before, credit) => before + credit, 0);
    const rows = [
      row(`at ${data.states[0]}`, precise(own[0])),
      row(`at ${data.states[data.states.length - 1]}`, precise(own[own.length - 1])),
      row("change", precise(total(chosen.token)[0])),
      row("sum of credits", `${precise(sum)}, gap ${error(gap(chosen.token)[0])}`),
    ];
    if (who.model !== null) rows.push(row("model's own logits", precise(who.model)));
    byId("sums").replaceChildren(element("tbody", {}, ...rows));
  }

  function drawOnsets() {
    const rows = rules.map((rule, place) => {
      const words = element("small", {}, rule.words);
      const current = place === chosen.rule ? { class: "current" } : {};
      const label = rule.labels[chosen.token];
      const there = rule.ends(chosen.token)[0] >= 0;
      return row(rule.rule, [there ? `${rule.kind} ${label}` : label, words], current);
    });
    byId("onsets").replaceChildren(element("tbody", {}, ...rows));
  }

  // --- the waterfall: the look of plots.waterfall, with this token's rows ----------------------------------------

  function waterfallRows(who) {
    const [own, level] = [credits(chosen.token), values(chosen.token)];
    const { states, unit } = data;
    const state = (place) => `${escaped(states[place])}<br>level ${precise(level[place])} ${unit}`;
    const rows = [{ label: states[0], amount: level[0], measure: "absolute", text: plain(level[0]), hover: state(0) }];
    let [start, sum] = [0, 0];
    for (const stop of who.groups) {
      const credit = own.subarray(start, stop).reduce((before, part) => before + part, 0);
      const label = who.labels[rows.length - 1];
      const path = `segment ${escaped(label)}: ${escaped(states[start])} \u2192 ${escaped(states[stop])}`;
      const amounts = `credit ${signed(credit) === "0" ? "0" : precise(credit)} ${unit}<br>level ${precise(level[stop])} ${unit}`;
      rows.push({ label, amount: credit, measure: "relative", text: signed(credit), hover: `${path}<br>${amounts}`, start, stop });
      sum += credit;
      start = stop;
    }
    const last = level.length - 1;
    const missing = level[last] - level[0] - sum;
    if (Math.abs(missing) > 1e-6 * Math.max(...level.map(Math.abs))) {
      const hover = `error of the estimator ${precise(missing)} ${unit}`;
      rows.push({ label: "gap", amount: missing, measure: "relative", text: signed(missing), hover });
    }
    rows.push({ label: states[last], amount: level[last], measure: "total", text: plain(level[last]), hover: state(last) });
    return rows;
  }

  // From the lowest end of a bar to the highest and to zero, and as much more as the numbers beside the bars take.
  function extent(rows, width) {
    const ends = [0];
    for (const { amount } of rows.slice(0, -1)) ends.push(ends[ends.length - 1] + (Number.isFinite(amount) ? amount : 0));
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    const longest = (texts) => Math.max(...texts.map((text) => text.length));
    const plot = width - 40 - 8 * longest(rows.map(({ label }) => label));
    const share = Math.min(0.3, (8 + 6.8 * longest(rows.map(({ text }) => text))) / plot);
    const room = ((high - low || 1) * share) / (1 - 2 * share);
    const losses = ends.slice(1).filter((_, place) => rows[place].amount < 0);
    return [Math.min(low, ...losses.map((end) => end - room)), high + room];
  }

  // A colour of the style sheet as this theme shows it.
  function shown(name) {
    const probe = document.body.appendChild(element("span", { style: `color:var(--${name})` }));
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  function drawWaterfall(who) {
    const rows = waterfallRows(who);
    const end = rules[chosen.rule].ends(chosen.token)[0];
    const onset = end === 0 ? 0 : rows.findIndex(({ start, stop }) => start < end && end <= stop); // -1: none
    const figure = structuredClone(data.figure);
    Object.assign(figure.trace, {
      x: rows.map(({ amount }) => amount),
      y: rows.map((_, place) => place),
      measure: rows.map(({ measure }) => measure),
      text: rows.map(({ text }) => text),
      hovertext: rows.map(({ hover }) => hover),
    });
    const { layout } = figure;
    Object.assign(layout.xaxis, { range: extent(rows, byId("waterfall").clientWidth), exponentformat: "power" });
    Object.assign(layout.yaxis, {
      tickvals: figure.trace.y,
      ticktext: rows.map(({ label }, place) => (place === onset ? `<b>\u25b8 ${escaped(label)}</b>` : escaped(label))),
      range: [-0.6, rows.length - 0.4],
    });
    layout.height = 24 * rows.length + 100;
    layout.shapes = onset < 0 ? [] : [{ ...data.figure.shade, y0: onset - 0.5, y1: onset + 0.5 }];
    inTheme(figure);
    const node = byId("waterfall");
    node.setAttribute("aria-label", `waterfall of ${who.target}: ${who.value}`);
    Plotly.react(node, [figure.trace], layout, {
      responsive: true,
      displaylogo: false,
      modeBarButtons: [["toImage"]],
      toImageButtonOptions: { format: "svg", filename: "waterfall" },
    });
  }

  function inTheme({ trace, layout }) {
    const [ink, line, whole, connector] = ["ink", "line", "whole", "connector"].map(shown);
    layout.font.color = ink;
    layout.paper_bgcolor = layout.plot_bgcolor = shown("paper");
    Object.assign(layout.xaxis, { gridcolor: line, zerolinecolor: connector });
    trace.textfont.color = ink;
    trace.totals.marker.color = whole;
    trace.connector.line.color = connector;
    layout.hoverlabel = { ...layout.hoverlabel, bgcolor: shown("soft"), bordercolor: line, font: { ...layout.hoverlabel.font, color: ink } };
    for (const shape of layout.shapes) shape.fillcolor = shown("shade");
  }

  // --- the table of layers --------------------------------------------------------------------------------------

  const largest = (numbers) => Math.max(0, ...[...numbers].filter(Number.isFinite).map(Math.abs));

  // A credit: its number, and its bar from the middle to the right for a gain, to the left for a loss.
  function bar(value, scale) {
    const node = element("td", { class: "bar", "aria-hidden": "true" });
    const share = scale > 0 && Number.isFinite(value) ? (50 * value) / scale : 0;
    node.style.setProperty("--from", `${Math.min(50, 50 + share)}%`);
    node.style.setProperty("--to", `${Math.max(50, 50 + share)}%`);
    node.style.setProperty("--bar", share < 0 ? "var(--loss)" : "var(--gain)");
    return [element("td", { class: "number" }, cell(value, scale, true)), node];
  }

  function head(name, unit, attributes) {
    return element("th", { scope: "col", ...attributes }, name, element("small", {}, unit || "\u00a0"));
  }

  function drawLayers(who) {
    const [own, level] = [credits(chosen.token), values(chosen.token)];
    const amounts = methods.map((method) => method.amounts(chosen.token));
    const scales = amounts.map(largest);
    const end = rules[chosen.rule].ends(chosen.token)[0];
    const body = data.states.map((state, place) => {
      const cells = [element("th", { scope: "row" }, place ? data.segments[place - 1] : state)];
      cells.push(...(place ? bar(own[place - 1], largest(own)) : [element("td", { colspan: 2 })]));
      cells.push(element("td", { class: "number" }, cell(level[place], largest(level))));
      amounts.forEach((numbers, column) => {
        cells.push(...(place ? bar(numbers[place - 1], scales[column]) : [element("td", { colspan: 2 })]));
      });
      if (lens) cells.push(...lensCells(who, place));
      return element("tr", place === end ? { class: "onset" } : {}, ...cells);
    });
    const right = { class: "number" };
    const barred = (name, unit) => [head(name, unit, right), element("td", {})];
    const titles = [
      head("segment", ""),
      ...barred("credit", data.unit),
      head("level", data.unit, right),
      ...methods.flatMap(({ name, unit }) => barred(name, unit)),
    ];
    if (lens) {
      if (lens.prob) titles.push(head("prob", "logit lens", right));
      titles.push(head("rank", "", right), head("most probable tokens", "logit lens"));
    }
    byId("layers").classList.toggle("full", lens !== null);
    byId("layers").replaceChildren(
      element("thead", {}, element("tr", {}, ...titles)),
      element("tbody", {}, ...body),
      element("tfoot", {}, ...footer()),
    );
  }

  function lensCells(who, place) {
    const { token } = chosen;
    const cells = lens.prob ? [element("td", { class: "number" }, cell(lens.prob(token)[place], largest(lens.prob(token))))] : [];
    cells.push(element("td", { class: "number" }, String(lens.rank(token)[place])));
    const tops = [...Array(lens.k).keys()].map((k) => {
      const at = place * lens.k + k;
      const which = lens.top(token)[at];
      const own = who.ids.includes(lens.ids[which]) ? { class: "own" } : {};
      return element("span", own, element("bdi", {}, lens.strings[which]), " ", element("small", {}, lens.probs(token)[at].toFixed(3)));
    });
    cells.push(element("td", { class: "tops", title: tops.map((top) => top.textContent).join("  ") }, ...tops));
    return cells;
  }

  function footer() {
    const { token } = chosen;
    const sum = credits(token).reduce((before, credit) => before + credit, 0);
    const mine = { sum, expected: total(token)[0], gap: gap(token)[0] };
    const filler = lens ? [element("td", { colspan: lens.prob ? 3 : 2 })] : [];
    const number = (value, name) => {
      const known = value !== undefined && !Number.isNaN(value);
      const text = !known ? "\u2013" : name === "gap" ? error(value) : cell(value, Math.abs(value), true);
      return [element("td", { class: "number" }, text), element("td", {})];
    };
    const names = methods.length ? ["sum", "outside", "expected", "gap"] : ["sum", "expected", "gap"];
    return names.map((name) => {
      const others = methods.flatMap(({ under }) => number(under[name]?.(token)[0], name));
      return element("tr", {}, element("th", { scope: "row" }, name), ...number(mine[name], name), element("td", {}), ...others, ...filler);
    });
  }

  // --- start ----------------------------------------------------------------------------------------------------

  function addRules() {
    rules.forEach((rule, place) => {
      const input = element("input", { type: "radio", name: "rule", value: rule.rule });
      input.checked = place === chosen.rule;
      input.disabled = !rule.known;
      input.addEventListener("change", () => {
        chosen.rule = place;
        colour();
        soon();
      });
      byId("rules").append(element("label", { title: rule.words }, input, rule.rule));
    });
  }

  function setTheme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    colour();
    soon();
  }

  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  prefersDark.addEventListener("change", (event) => setTheme(event.matches));
  byId("theme").addEventListener("click", () => setTheme(!isDark()));
  addEventListener("resize", soon);
  for (const strip of document.querySelectorAll(".strip")) {
    strip.addEventListener("keydown", onKey);
    strip.addEventListener("click", (event) => {
      const button = event.target.closest(".token");
      if (button) choose(Number(button.dataset.entry), true);
    });
  }
  addRules();
  setTheme(prefersDark.matches);
  choose(chosen.token, false);
})();
