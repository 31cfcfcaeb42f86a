// The style sheet of the HTML report, for light and dark screens and for paper.
#pragma once

namespace moe::tools {

inline constexpr const char* style = R"css(
:root{color-scheme:light dark;--ink:#1d2530;--soft:#5d6b7c;--line:#dde3ea;--page:#fff;--card:#f4f6f9;--bar:#3b78b8;
--gain:#2f8f63;--loss:#c2553d;--mark:#b03030}
@media (prefers-color-scheme:dark){:root{--ink:#e4e9f0;--soft:#9aa8b9;--line:#36404d;--page:#12161c;--card:#1c222b;
--bar:#5c9bd8;--gain:#4fb587;--loss:#e07a5f;--mark:#ff8a80}}
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:var(--ink);
background:var(--page)}
h1{font-size:1.6em;margin-bottom:.2em}h2{font-size:1.15em;margin:2.2em 0 .3em}
.note,.plan{color:var(--soft);margin:.2em 0 .8em}.plan span{white-space:nowrap;margin-right:.9em}.plan b{color:var(--ink);
font-weight:600;white-space:normal;overflow-wrap:anywhere}
.cards{display:flex;flex-wrap:wrap;gap:.8em}.cards div{background:var(--card);border-radius:8px;padding:.6em 1.1em}
.cards b{display:block;font-size:1.5em}.cards span{color:var(--soft)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(480px,1fr));gap:0 3em}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.15em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;font-weight:400}
th[scope=row],th:first-child,th:nth-child(8){text-align:left}th[scope=col]{color:var(--soft)}td.text{text-align:left;white-space:normal;
color:var(--soft);overflow-wrap:anywhere}
td.wide{width:45%;text-align:left}.bar{display:inline-block;height:.75em;background:var(--bar);border-radius:2px}
td.swing{width:140px;padding:0}td.swing span{display:block;height:.75em;border-radius:2px}
td.swing .gain{background:var(--gain);margin-left:50%}td.swing .loss{background:var(--loss);margin-left:auto;
margin-right:50%}
tr.unfit th,tr.unfit td{color:var(--soft);text-decoration:line-through}tr.unfit .gain,tr.unfit .loss{opacity:.4}
svg{width:100%;font:12px system-ui,sans-serif}svg text{fill:var(--ink);paint-order:stroke;stroke:var(--page);stroke-width:3px}.grid{stroke:var(--line)}
.mark{stroke:var(--mark);stroke-dasharray:5 4}.hover{fill:transparent}.hover:hover{fill:var(--ink);fill-opacity:.12}
.m0{fill:#8795a6}.m1{fill:#3b78b8}.m2{fill:#7a5ea8}.m3{fill:#3d9a8b}.m4{fill:#a0a83c}.m5{fill:#e0a13c}.m6{fill:#c8643c}
.front{fill:none;stroke:var(--soft);stroke-dasharray:2 3}.point{fill:var(--bar)}.over{fill:var(--loss)}
.here{fill:var(--gain)}
@media print{body{max-width:none;margin:0;font-size:11px}section{break-inside:avoid}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
@media (max-width:700px){.pair{grid-template-columns:1fr}section{overflow-x:auto}}
)css";

} // namespace moe::tools
