(function () {
  "use strict";
  var root = document.documentElement;
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var chosen = null;
  var figures = JSON.parse(document.getElementById("plots").textContent);
  var config = { responsive: true, displayModeBar: false, scrollZoom: false, doubleClick: false };

  function value(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }

  function colours() {
    return {
      "font.color": value("--muted"), "font.size": 12.5,
      "xaxis.title.font.size": 12.5, "yaxis.title.font.size": 12.5,
      "font.family": getComputedStyle(document.body).fontFamily,
      "xaxis.linecolor": value("--line"), "xaxis.tickcolor": value("--line"), "xaxis.showline": true,
      "yaxis.gridcolor": value("--line"),
      "hoverlabel.bgcolor": value("--card"), "hoverlabel.bordercolor": value("--line"),
      "hoverlabel.font.color": value("--ink")
    };
  }

  function theme() {
    root.setAttribute("data-theme", chosen || (dark.matches ? "dark" : "light"));
    Object.keys(figures).forEach(function (name) {
      var place = document.getElementById("plot-" + name);
      if (place && place.data) Plotly.relayout(place, colours());
    });
  }

  theme();
  Object.keys(figures).forEach(function (name) {
    var place = document.getElementById("plot-" + name);
    Plotly.newPlot(place, figures[name].data, figures[name].layout, config).then(function () {
      return Plotly.relayout(place, colours());
    });
  });
  dark.addEventListener("change", theme);
  document.getElementById("theme").addEventListener("click", function () {
    chosen = root.getAttribute("data-theme") === "dark" ? "light" : "dark";
    theme();
  });
  document.getElementById("copy").addEventListener("click", function (event) {
    var button = event.currentTarget, text = document.getElementById("sentence").textContent;
    function done() { button.textContent = "copied"; setTimeout(function () { button.textContent = "copy the sentence"; }, 1600); }
    if (navigator.clipboard && window.isSecureContext) { navigator.clipboard.writeText(text).then(done); return; }
    // A file opened from disk has no clipboard interface in some browsers: select it, let the browser copy it.
    var range = document.createRange();
    range.selectNodeContents(document.getElementById("sentence"));
    var selection = window.getSelection();
    selection.removeAllRanges(); selection.addRange(range);
    document.execCommand("copy"); done();
  });
})();
