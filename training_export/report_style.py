"""The style sheet of the report: one column, readable on a phone, light and dark."""

CSS = """
:root { --bg:#fbfaf8; --card:#fff; --ink:#1d1f23; --soft:#5d636e; --line:#e2dfd9; --code:#f4f2ee;
  --blue:#3567b0; --green:#2c7d4f; --red:#b3403a; --track:#ece9e3; }
@media (prefers-color-scheme: dark) { :root { --bg:#15171a; --card:#1c1f24; --ink:#e6e4df;
  --soft:#9aa1ad; --line:#2e3239; --code:#111316; --blue:#7ba6e6; --green:#6cc493; --red:#ea8a80;
  --track:#2a2e35; } }
* { box-sizing:border-box }
body { margin:0 auto; padding:2rem 1rem 4rem; max-width:62rem; background:var(--bg);
  color:var(--ink); font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
h1 { font-size:1.7rem; margin:0 } h2 { font-size:1.15rem; margin:2.6rem 0 .6rem }
p { margin:.3rem 0 } .soft { color:var(--soft); font-size:.9rem }
code,pre { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; font-size:.82rem }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(9rem,1fr)); gap:.7rem;
  margin-top:1.4rem }
.tile { background:var(--card); border:1px solid var(--line); border-radius:10px;
  padding:.7rem .9rem }
.tile b { display:block; font-size:1.5rem; font-variant-numeric:tabular-nums }
.stage { display:grid; grid-template-columns:7.5rem 1fr 7.5rem; gap:.2rem .8rem; padding:.45rem 0;
  border-top:1px solid var(--line); align-items:center }
.stage:first-of-type { border-top:0 }
.bar { height:.8rem; border-radius:4px; background:var(--track); overflow:hidden }
.bar i { display:block; height:100%; background:var(--blue) }
.num { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
.why { grid-column:2 / -1; color:var(--soft); font-size:.85rem }
.why span { display:inline-block; margin-right:.9rem }
svg { width:100%; height:auto; display:block; margin:.5rem 0 } svg text { fill:var(--soft);
  font:14px system-ui,sans-serif } .axis { stroke:var(--line) }
.one { stroke:var(--ink); stroke-dasharray:3 3 } .eager { fill:var(--blue) }
.compile { fill:var(--green) }
.grid { display:grid; grid-template-columns:1fr 3.4rem 4.6rem 3.6rem 4.4rem 4.8rem; gap:.6rem;
  align-items:baseline }
.head { color:var(--soft); font-size:.85rem; padding:.3rem .9rem }
details { background:var(--card); border:1px solid var(--line); border-radius:10px;
  margin:.35rem 0 }
summary { cursor:pointer; padding:.55rem .9rem; list-style:none }
summary::-webkit-details-marker { display:none }
summary:hover, summary:focus-visible { background:var(--code); border-radius:10px }
.ops { overflow-wrap:anywhere }
.grid .score { text-align:center }
.r { display:inline-block; min-width:1.9rem; text-align:center; border-radius:6px;
  border:1px solid currentColor; font-size:.85rem }
.r3 { color:var(--green) } .r2 { color:var(--blue) } .r1 { color:var(--soft) }
.rx { color:var(--red) }
h3 { font-size:1rem; margin:1.1rem 0 .2rem; text-transform:capitalize }
.inside { padding:0 .9rem .9rem }
dl { display:grid; grid-template-columns:repeat(auto-fit,minmax(15rem,1fr)); gap:.2rem 1.2rem;
  margin:.4rem 0 } dl div { display:flex; justify-content:space-between; gap:1rem;
  border-bottom:1px solid var(--line); font-size:.9rem } dt { color:var(--soft) }
dd { margin:0; text-align:right; font-variant-numeric:tabular-nums; overflow-wrap:anywhere }
h4 { margin:.9rem 0 .2rem; font-size:.85rem; font-weight:600 }
pre { margin:0; padding:.7rem; background:var(--code); border-radius:8px; overflow:auto;
  max-height:26rem; line-height:1.4 }
@media (max-width:40rem) { .stage { grid-template-columns:1fr auto }
  .bar,.why { grid-column:1 / -1 }
  .stage .num { grid-row:1; grid-column:2 } .grid { grid-template-columns:1fr 2.4rem 3.8rem 4rem }
  .wide { display:none } svg text { font-size:22px } }
"""
