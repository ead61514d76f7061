"""How a page looks: on screens light and dark, wide and narrow, and on paper."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d5dae0;--panel:#f5f7f9;--link:#0a58ca;
--cloud:#7d8894;--warn-bg:#fff3d6;--warn-fg:#7a4a00;--sure-bg:#e3f4ea;--sure-fg:#14532d;
--compute:#009e73;--memory:#3f9fd8;--network:#c06795;--overhead:#d99000;--bubble:#d55e00;--floor:#1b1f24;
--m0:#d5dae0;--m1:#3f7fbf;--m2:#e08a3c;--m3:#8a6fc0;--m4:#7d8894}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ed;--soft:#a0abb8;--line:#363d46;--panel:#1c2127;
--link:#8ab8ff;--cloud:#6d7885;--warn-bg:#4a3500;--warn-fg:#ffd98a;--sure-bg:#123524;--sure-fg:#a5e3bf;
--floor:#fff;--m0:#414a55}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:20px 20px 60px}
h1{font-size:1.5rem;line-height:1.25;margin:.2em 0 .4em}
h2{font-size:1.15rem;margin:2.2em 0 .5em;padding-top:.5em;border-top:1px solid var(--line)}
p{max-width:80ch;margin:.5em 0}
a{color:var(--link)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:1em 0;font-size:.9rem}
.answer{font-size:1.15rem;max-width:72ch;border-left:4px solid var(--link);padding:.3em 0 .3em .8em;margin:.8em 0}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:1em 0;padding:0;list-style:none}
.tiles li{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:8px 14px;min-width:104px}
.tiles b{display:block;font-size:1.2rem}
.tiles span{color:var(--soft);font-size:.82rem}
.scroll{overflow-x:auto;max-width:100%}
.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:separate;border-spacing:0;font-size:.86rem;font-variant-numeric:tabular-nums;width:100%}
caption{text-align:left;color:var(--soft);padding:2px 0 6px;font-size:.86rem}
th,td{padding:4px 10px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
thead th{border-bottom:2px solid var(--line);vertical-align:bottom;white-space:nowrap}
tbody th{font-weight:600;white-space:nowrap}
.n{text-align:right;white-space:nowrap}
tbody tr:hover>*{background:var(--panel)}
#ranking thead th{white-space:normal}
#facts tbody th{white-space:normal;min-width:15em;font-weight:400}
th button{all:unset;cursor:default;font-weight:600}
th small{display:block;color:var(--soft);font-weight:400;font-size:.78rem}
.js .sorts th button{cursor:pointer}
.js .sorts th button:hover{text-decoration:underline}
th button:focus-visible,.key button:focus-visible{outline:2px solid var(--link);outline-offset:2px;
border-radius:3px}
.js .sorts thead th{padding-right:18px;position:relative}
.js .sorts thead th:has(button)::after{content:"\\2195";position:absolute;right:4px;bottom:5px;color:var(--soft);
opacity:.45;font-weight:400}
.js .sorts thead th:has(button)[aria-sort=ascending]::after{content:"\\2191";opacity:1;color:var(--fg)}
.js .sorts thead th:has(button)[aria-sort=descending]::after{content:"\\2193";opacity:1;color:var(--fg)}
td:has(svg.bar){min-width:160px;width:38%}
.bar{width:100%;height:14px;display:block;margin-top:4px}
.compute{fill:var(--compute)}.memory{fill:var(--memory)}.network{fill:var(--network)}
.overhead{fill:var(--overhead)}.bubble{fill:var(--bubble)}
line.floor{stroke:var(--floor);stroke-width:3;vector-effect:non-scaling-stroke}
.m0{fill:var(--m0)}.m1{fill:var(--m1)}.m2{fill:var(--m2)}.m3{fill:var(--m3)}.m4{fill:var(--m4)}
.key{display:flex;flex-wrap:wrap;gap:4px 14px;list-style:none;padding:0;margin:.5em 0;font-size:.86rem}
.key li{display:flex;align-items:center;gap:6px}
.key button{all:unset;display:flex;align-items:center;gap:5px;border-radius:4px;padding:1px 4px}
.js .key button{cursor:pointer}
.key button[aria-pressed=true]{background:var(--panel);box-shadow:0 0 0 1px var(--soft)}
.swatch{width:16px;height:12px;border-radius:3px;display:inline-block}
.swatch.compute{background:var(--compute)}.swatch.memory{background:var(--memory)}
.swatch.network{background:var(--network)}.swatch.overhead{background:var(--overhead)}
.swatch.bubble{background:var(--bubble)}.swatch.floor{width:3px;background:var(--floor)}
figure{margin:.5em 0}
figcaption{color:var(--soft);font-size:.86rem;max-width:90ch}
#frontier text{fill:currentColor;font:12px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
#frontier{width:100%;min-width:560px;height:auto;display:block;max-width:980px}
#frontier:focus-visible{outline:2px solid var(--link)}
#frontier .grid{stroke:var(--line);stroke-width:1}
#frontier .cloud{stroke:var(--cloud);stroke-width:4.5;stroke-linecap:round;fill:none;opacity:.8}
#frontier polyline.frontier{fill:none;stroke:var(--soft);stroke-width:1.3}
#frontier .mark,.key .mark{stroke:var(--fg);stroke-width:.8}
#frontier .first{fill:none;stroke:var(--fg);stroke-width:1.8}
#frontier .same{fill:none;stroke:var(--fg);stroke-width:6;stroke-linecap:round;opacity:.8}
#frontier .halo{fill:none;stroke:var(--fg);stroke-width:2}
#frontier .glass{fill:transparent}
.seating{display:block}
.seating text{font-family:inherit}
.tip{position:fixed;z-index:9;background:var(--fg);color:var(--bg);padding:7px 10px;border-radius:6px;
font-size:.82rem;
pointer-events:none;white-space:pre;line-height:1.4;box-shadow:0 2px 10px rgb(0 0 0/.3)}
.columns{display:none}
.js .columns{display:block;margin:.4em 0;font-size:.86rem}
.columns .choices{display:flex;flex-wrap:wrap;gap:2px 14px;padding:6px 0}
.columns label,.only{display:inline-flex;gap:5px;align-items:center}
.only{display:none;font-size:.86rem}
.js .only{display:inline-flex}
details{margin:.5em 0}
summary{cursor:pointer;color:var(--link);font-size:.9rem}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:4px 16px;font-size:.86rem;
margin:.5em 0}
.facts dt{color:var(--soft);font-size:.8rem}
.facts dd{margin:0;overflow-wrap:anywhere}
.sure,.unsure{display:inline-block;padding:0 7px;border-radius:9px;font-size:.8rem;white-space:nowrap;
background:var(--sure-bg);color:var(--sure-fg)}
.unsure{background:var(--warn-bg);color:var(--warn-fg);border:1px dashed currentColor;font-weight:600}
tr:has(.unsure) td,tr:has(.unsure) th{font-style:italic}
td:has(.source){min-width:20em}
.source{overflow-wrap:anywhere;color:var(--soft);font-size:.8rem}
code{font:13px/1.4 ui-monospace,"DejaVu Sans Mono",monospace;background:var(--panel);padding:2px 5px;
border-radius:4px;overflow-wrap:anywhere}
[hidden]{display:none!important}
@media (max-width:760px){#ranking tbody th{position:sticky;left:0;background:var(--bg)}}
@media (max-width:640px){main{padding:12px 12px 40px}th,td{padding:4px 6px}.answer{font-size:1.05rem}
td:has(svg.bar){min-width:110px}}
@media print{:root{--bg:#fff;--fg:#000;--soft:#444;--line:#bbb;--panel:#fff;--floor:#000}main{max-width:none;
padding:0}
body{font-size:10pt}nav,.columns,.only,.tip,#frontier .halo{display:none!important}.scroll{overflow:visible}
table{font-size:7.5pt}th,td{padding:2px 4px}tbody th,thead th{white-space:normal}tr,figure{break-inside:avoid}
h2{break-after:avoid}#frontier{min-width:0}.seating{max-width:100%;height:auto}
.sorts thead th::after{content:""!important}svg,.swatch{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
