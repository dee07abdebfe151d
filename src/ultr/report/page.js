"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const panels = tabs.map((tab) => document.getElementById(tab.getAttribute("aria-controls")));
  const plots = [...document.querySelectorAll(".plot")];
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function themeLayout() {
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { font: { family: "system-ui, sans-serif" } },
      xaxis: axis, yaxis: { ...axis, automargin: true },
    };
  }

  function layoutOf(figure) {
    const layout = figure.layout || {}, theme = themeLayout();
    const merged = { margin: { l: 48, r: 12, t: 12, b: 48 }, autosize: true, ...theme, ...layout };
    merged.xaxis = { ...theme.xaxis, ...layout.xaxis };
    merged.yaxis = { ...theme.yaxis, ...layout.yaxis };
    merged.legend = { orientation: "h", y: 1.02, yanchor: "bottom" };
    return merged;
  }

  function traceOf(trace) {
    return trace.type === "heatmap" ? { ...trace, colorscale: [[0, colour("--card")], [1, colour("--accent")]] } : trace;
  }

  function draw(plot) {
    const figure = figures[Number(plot.dataset.plot)];
    Plotly.react(plot, figure.data.map(traceOf), layoutOf(figure), { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
    plot.dataset.drawn = "yes";
  }

  const visible = (plot) => plot.offsetParent !== null;
  const drawVisible = (again) => plots.filter((p) => visible(p) && (again || !p.dataset.drawn)).forEach(draw);

  function choose(number, focus) {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === number));
      tab.tabIndex = i === number ? 0 : -1;
      panels[i].hidden = i !== number;
    });
    if (focus) tabs[number].focus();
    tabs[number].scrollIntoView({ block: "nearest", inline: "nearest" });
    drawVisible(false);
    plots.filter((p) => visible(p) && p.dataset.drawn).forEach((p) => Plotly.Plots.resize(p));
  }

  function fromHash() {
    const number = panels.findIndex((panel) => "#" + panel.id === window.location.hash);
    choose(Math.max(0, number), false);
  }

  if (tabs.length > 1) {
    document.body.classList.add("tabbed");
    document.querySelector(".tabs").hidden = false;
    tabs.forEach((tab, i) => {
      tab.addEventListener("click", () => { history.replaceState(null, "", "#" + panels[i].id); choose(i, false); });
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) { event.preventDefault(); choose((i + step + tabs.length) % tabs.length, true); }
      });
    });
    window.addEventListener("hashchange", fromHash);
    fromHash();
  } else drawVisible(false);

  document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", () => drawVisible(false)));
  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", () => {
    const text = button.parentElement.querySelector("code").textContent;
    const show = (message) => { button.textContent = message; setTimeout(() => { button.textContent = "copy"; }, 1500); };
    const failed = () => show("not copied");
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => show("copied"), failed);
    else failed();
  }));

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawAgain = () => plots.filter((p) => p.dataset.drawn).forEach(draw);
  dark.addEventListener("change", drawAgain);
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    drawAgain();
  });

  // In print, all sections follow one another, in the light theme.
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = { theme: root.dataset.theme, open: [...document.querySelectorAll("details:not([open])")] };
    root.dataset.theme = "light";
    panels.forEach((panel) => { panel.hidden = false; });
    before.open.forEach((d) => { d.open = true; });
    drawVisible(true);
    plots.forEach((p) => Plotly.relayout(p, { width: Math.min(680, p.clientWidth), autosize: false }));
  });
  window.addEventListener("afterprint", () => {
    if (!before) return;
    if (before.theme) root.dataset.theme = before.theme; else delete root.dataset.theme;
    before.open.forEach((d) => { d.open = false; });
    before = null;
    plots.forEach((p) => { delete p.dataset.drawn; });
    if (tabs.length > 1) fromHash(); else drawVisible(false);
  });
  document.body.dataset.ready = "yes";
})();
