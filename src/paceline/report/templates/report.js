"use strict";
// Draws the figures that stand as data in this page; the reader chooses axes, theme, and what to save.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const chosen = {};  // by figure: {axis, log}
  const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  const layout = (figure, state) => {
    const axis = { gridcolor: css("line"), zerolinecolor: css("line"), linecolor: css("line"), automargin: true };
    const shown = figure.axes.length ? figure.axes[state.axis] : figure.x;
    const found = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 50, r: 12, t: 8, b: 40 },
      font: { color: css("ink"), family: "system-ui, sans-serif", size: 12 }, dragmode: false,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" }, showlegend: figure.traces.length > 1 && figure.kind !== "marks",
      xaxis: { ...axis, title: { text: shown } }, yaxis: { ...axis, title: { text: figure.y }, type: state.log ? "log" : "-", rangemode: figure.from_zero ? "tozero" : "normal" },
      hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink") } },
    };
    if (figure.kind === "bars") Object.assign(found, { barmode: "stack", yaxis: { ...axis, autorange: "reversed", type: "category" } });
    if (figure.kind === "matrix") Object.assign(found, { xaxis: { ...axis, title: { text: figure.x }, type: "category" }, yaxis: { ...axis, title: { text: figure.y }, autorange: "reversed", type: "category" } });
    if (figure.kind === "marks") found.yaxis = { ...axis, type: "category", autorange: "reversed" };
    return found;
  };

  const trace = (figure, one, state) => {
    const colour = css(one.colour || "blue"), x = one["x" + state.axis] || one.x0;
    if (figure.kind === "bars") return { type: "bar", orientation: "h", name: one.name, x, y: one.y, hovertemplate: "%{y} " + "%{x:.2f} ms", marker: { color: colour, pattern: { shape: one.pattern, fgcolor: css("ground"), fgopacity: 0.6, solidity: 0.2, fillmode: "overlay" } } };
    if (figure.kind === "matrix") return { type: "heatmap", x, y: one.y, z: one.z, zmin: 0, hoverongaps: false, colorscale: [[0, css("card")], [1, css("orange")]], showscale: false, text: one.z.map((row) => row.map((value) => value === null ? "" : Math.round(value) + " %")), texttemplate: one.y.length <= 16 ? "%{text}" : "", hovertemplate: "%{y} for %{x}: %{z} %<extra></extra>" };
    if (figure.kind === "marks") return { type: "scatter", mode: "markers", name: one.name, x, y: one.y, text: one.text, hovertemplate: "%{x:.2f} min: %{text}<extra></extra>", marker: { color: colour, size: 10, symbol: one.marks } };
    return { type: "scatter", mode: one.markers || one.y.length < 4 ? "lines+markers" : "lines", name: one.name, x, y: one.y, line: { color: colour, width: 1.7, dash: one.dash } };
  };

  const draw = (box) => {
    const figure = data.figures[box.dataset.figure];
    const state = chosen[figure.name] ||= { axis: 0, log: false };
    const rows = figure.kind === "bars" || figure.kind === "matrix" ? figure.traces[0].y.length : 0;
    if (rows > 8) box.style.setProperty("--tall", Math.min(70, 8 + 1.1 * rows) + "rem");
    Plotly.react(box, figure.traces.map((one) => trace(figure, one, state)), layout(figure, state), { displayModeBar: false, responsive: true });
    box.classList.add("drawn");
  };
  const boxes = [...document.querySelectorAll(".plot")];
  const near = new IntersectionObserver((seen) => seen.forEach((one) => {
    if (one.isIntersecting) { near.unobserve(one.target); draw(one.target); }
  }), { rootMargin: "600px" });
  boxes.forEach((box) => near.observe(box));
  const again = () => boxes.filter((box) => box.classList.contains("drawn")).forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", () => boxes.forEach(draw));
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    again();
  });

  const csv = (figure) => {
    const axes = figure.axes.length ? figure.axes : [figure.x || "x"], cell = (value) => '"' + String(value ?? "").replaceAll('"', '""').replace(/^\s*[=+@-].*/s, (text) => (isNaN(text) ? "'" : "") + text) + '"';
    const rows = [["name", ...axes, figure.y || "y"]];
    for (const one of figure.traces) {
      if (one.z) one.z.forEach((row, i) => row.forEach((value, j) => rows.push([one.y[i], one.x0[j], value])));
      else one.y.forEach((value, i) => rows.push([one.name, ...axes.map((_, n) => one["x" + n]?.[i]), value]));
    }
    return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".tools button");
    if (!button) return;
    const box = button.closest("figure").querySelector(".plot"), figure = data.figures[box.dataset.figure];
    const state = chosen[figure.name] ||= { axis: 0, log: false };
    if (button.dataset.save) {
      const text = button.dataset.save === "csv" ? csv(figure) : JSON.stringify(figure, null, 1), link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
      link.download = data.name + "-" + figure.name + "." + button.dataset.save;
      link.click();
      return URL.revokeObjectURL(link.href);
    }
    if (button.dataset.axis) {
      state.axis = Number(button.dataset.axis);
      button.parentElement.querySelectorAll("[data-axis]").forEach((one) => one.setAttribute("aria-pressed", one === button));
    } else {
      state.log = !state.log;
      button.setAttribute("aria-pressed", state.log);
    }
    draw(box);
  });
})();
