"""What a page does: tables sort, columns come and go, points of the picture say their figures. No library."""

SCRIPT = r"""
(function () {
  "use strict";
  var root = document.documentElement;
  root.classList.add("js");

  function each(list, work) { Array.prototype.forEach.call(list, work); }
  function make(name, text) {
    var node = document.createElement(name);
    if (text !== undefined) { node.textContent = text; }
    return node;
  }

  // Tables: a heading sorts, again it turns the order round; empty cells stay last, equals keep the order of the page.
  each(document.querySelectorAll("table.sorts"), function (table) {
    var body = table.tBodies[0];
    each(body.rows, function (row, place) { row.place = place; });
    each(table.tHead.rows[0].cells, function (head, column) {
      var button = head.querySelector("button");
      if (!button) { return; }
      button.addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") === "ascending";
        each(table.tHead.rows[0].cells, function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sort(body, column, head.dataset.kind === "number", down ? -1 : 1);
      });
    });
  });

  function key(row, column, figure) {
    var cell = row.cells[column];
    var text = (cell.dataset.v !== undefined ? cell.dataset.v : cell.textContent).trim();
    if (text === "") { return null; }
    return figure ? Number(text) : text;
  }

  function sort(body, column, figure, sign) {
    var rows = Array.prototype.map.call(body.rows, function (row) {
      return { row: row, key: key(row, column, figure) };
    });
    rows.sort(function (a, b) {
      if (a.key === null || b.key === null) {
        return (a.key === null) - (b.key === null) || a.row.place - b.row.place;
      }
      var order = figure ? a.key - b.key : a.key.localeCompare(b.key, undefined, { numeric: true });
      return sign * order || a.row.place - b.row.place;
    });
    rows.forEach(function (each) { body.appendChild(each.row); });
  }

  // Columns of the ranking: a box for each.
  each(document.querySelectorAll(".columns"), function (place) {
    var table = document.getElementById(place.dataset.for);
    var details = make("details");
    details.appendChild(make("summary", "Columns"));
    var choices = make("div");
    choices.className = "choices";
    each(table.tHead.rows[0].cells, function (head, column) {
      var button = head.querySelector("button"), small = button.querySelector("small");
      var words = button.firstChild.textContent + (small ? ", " + small.textContent : "");
      var label = make("label"), box = make("input");
      box.type = "checkbox";
      box.checked = head.dataset.more === undefined;
      function show() { each(table.rows, function (row) { row.cells[column].hidden = !box.checked; }); }
      box.addEventListener("change", show);
      show();
      label.appendChild(box);
      label.appendChild(document.createTextNode(words));
      choices.appendChild(label);
    });
    details.appendChild(choices);
    place.appendChild(details);
  });

  // Facts: only those that nobody measured.
  var only = document.getElementById("only");
  if (only) {
    only.addEventListener("change", function () {
      each(document.getElementById("facts").tBodies[0].rows, function (row) {
        row.hidden = only.checked && !row.querySelector(".unsure");
      });
    });
  }

  // What is folded is printed too.
  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.prototype.filter.call(document.querySelectorAll("details:not([open])"), function (one) {
      return !one.closest(".columns");
    });
    opened.forEach(function (one) { one.open = true; });
  });
  window.addEventListener("afterprint", function () { opened.forEach(function (one) { one.open = false; }); });

  // The picture: the nearest point says its figures; a name shows all points of its plan.
  var picture = document.getElementById("frontier");
  if (picture) {
    var data = JSON.parse(document.getElementById("points").textContent);
    var points = data.on.concat(data.first ? [data.first] : [], data.cloud);
    var halo = picture.querySelector(".halo"), same = picture.querySelector(".same");
    var tip = document.getElementById("tip"), chosen = -1, walked = -1;
    var FAR = 26;

    function said(point) {
      var lines = [data.plans[point[2]] + ", load " + point[3], "TPOT " + point[4] + " ms, TTFT " + point[5] + " ms",
        "latency " + point[6] + " ms", point[7] + " tokens/s, " + point[8] + " per chip"];
      if (point[9]) { lines.push(point[9] + " $/Mtok"); }
      return lines.join("\n");
    }
    function inside(x, y) {
      var matrix = picture.getScreenCTM(), at = picture.createSVGPoint();
      at.x = x;
      at.y = y;
      return [at.matrixTransform(matrix.inverse()), at.matrixTransform(matrix), matrix];
    }
    function trail(plan) {
      var path = "";
      points.forEach(function (point) { if (point[2] === plan) { path += "M" + point[0] + " " + point[1] + "h0"; } });
      same.setAttribute("d", path);
    }
    function show(point) {
      halo.setAttribute("cx", point[0]);
      halo.setAttribute("cy", point[1]);
      var screen = inside(point[0], point[1])[1];
      tip.textContent = said(point);
      tip.hidden = false;
      var box = tip.getBoundingClientRect();
      var x = screen.x + 14, y = screen.y - box.height - 12;
      if (x + box.width > window.innerWidth - 6) { x = screen.x - box.width - 14; }
      tip.style.left = Math.max(6, x) + "px";
      tip.style.top = Math.max(6, y) + "px";
    }
    function hide() {
      tip.hidden = true;
      halo.setAttribute("cx", -99);
      walked = -1;
    }
    picture.addEventListener("pointermove", function (event) {
      var at = inside(event.clientX, event.clientY)[0], best = null, least = FAR * FAR;
      points.forEach(function (point) {
        var gap = (point[0] - at.x) * (point[0] - at.x) + (point[1] - at.y) * (point[1] - at.y);
        if (gap < least) { least = gap; best = point; }
      });
      if (best) { show(best); } else { hide(); }
    });
    picture.addEventListener("pointerleave", hide);
    picture.addEventListener("blur", hide);
    window.addEventListener("scroll", hide, { passive: true });
    picture.addEventListener("keydown", function (event) {
      var step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Escape") { hide(); }
      if (!step) { return; }
      event.preventDefault();
      walked = Math.min(data.on.length - 1, Math.max(0, walked + step));
      show(data.on[walked]);
    });
    each(document.querySelectorAll(".key button[data-plan]"), function (button) {
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", function () {
        var plan = Number(button.dataset.plan);
        chosen = chosen === plan ? -1 : plan;
        trail(chosen);
        each(document.querySelectorAll(".key button[data-plan]"), function (other) {
          other.setAttribute("aria-pressed", String(Number(other.dataset.plan) === chosen));
        });
      });
    });
  }
  root.dataset.ready = "yes";
})();
"""
