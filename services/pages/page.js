"use strict"
// A definition in place: a link's panel is a frame of the page that it leads to. There only what is asked for is shown,
// and what happens is told to the page around it. The browser places a panel, and closes it.
const framed = self !== top, panels = document.getElementsByTagName("aside")
let timer

function open(pages, link) {
  const below = panels[panels.length - 1] ?? document.body
  const frames = pages.split(" ").map(page => `<iframe src="${page.replace("#", "?")}" title=definition></iframe>`)
  below.insertAdjacentHTML("beforeend", `<aside popover>${frames.join("")}</aside>`)
  const panel = below.lastElementChild
  panel.showPopover({ source: link })
  panel.addEventListener("toggle", event => {
    if (event.newState === "open") return
    panel.remove()
    if (document.activeElement === document.body) (below.querySelector("iframe") ?? link).focus()
  })
  return panel
}
addEventListener("message", ({ data, source }) => {
  const last = panels[panels.length - 1], frame = [...last.children].find(frame => frame.contentWindow === source)
  if (data > 0) frame.height = data
  else data ? open(data, frame).firstChild.focus() : last.hidePopover()
})
addEventListener("click", event => {
  const link = event.target.closest("main a[href*='#']"), pages = link?.dataset.pages ?? link?.getAttribute("href")
  if (!link || event.ctrlKey || event.metaKey) return
  event.preventDefault()
  framed ? parent.postMessage(pages, "*") : open(pages, link).firstChild.focus()
})
addEventListener("mouseover", event => {
  const link = event.target.closest("a[data-pages]")
  clearTimeout(timer)
  if (framed || document.querySelector("aside:hover, aside:focus-within")) return
  timer = setTimeout(() => link ? open(link.dataset.pages, link) : panels[0]?.hidePopover(), link ? 150 : 400)
})
if (framed) {
  document.body.className = "framed"
  const name = location.search.slice(1), title = document.querySelector("h1 a")
  document.getElementById(name)?.classList.add("asked")
  title.hash = name
  title.append(title.hash)
  parent.postMessage(document.body.scrollHeight, "*")
  addEventListener("keydown", event => event.key === "Escape" && parent.postMessage("", "*"))
}

// A picture that moves: the boxes of the chosen frame, as far as its moment has come, and the note of the chosen box.
for (const form of framed ? [] : document.forms) {
  const [text, stage, says, data] = form.querySelectorAll("p, .stage, output, script"), { moment, play } = form
  const frames = JSON.parse(data.textContent)
  let frame

  function tell() {
    const chosen = frame.boxes[stage.querySelector(":checked")?.value], linked = chosen?.[6] ?? []
    const others = linked.map(n => frame.linked + frame.boxes[n][5].split("\n")[0])
    stage.querySelectorAll("label").forEach((box, n) => box.classList.toggle("linked", linked.includes(n)))
    stage.style.setProperty("--moment", moment.value)
    says.textContent = [frame.moments[moment.value], chosen?.[5], ...others].filter(Boolean).join("\n")
  }
  function draw() {
    frame = frames[Array.from(form.querySelectorAll("select"), select => select.value).join("/")]
    const rows = frame.rows.map((name, y) => `<span style="grid-row: ${y + 1}">${name}</span>`)
    const boxes = frame.boxes.map(([y, x, width, colour, label, , , since], n) => `<label style="--since: ${since};
      --colour: ${colour}; grid-area: ${y + 1} / ${x + 2} / auto / span ${width}"><input type=radio name=box value=${n}>
      ${label}</label>`)
    text.textContent = frame.text
    stage.style = `--rows: ${rows.length}; --columns: ${frame.width}`
    stage.innerHTML = [...rows, ...boxes].join("")
    moment.value = moment.max = frame.moments.length - 1
    tell()
  }
  form.addEventListener("input", event => event.target.matches("select") ? draw() : tell())
  stage.addEventListener("mouseover", event => event.target.control?.click())
  setInterval(() => play.checked && tell(moment.value = (+moment.value + 1) % frame.moments.length), 400)
  draw()
}
