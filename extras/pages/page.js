"use strict"
const contents = document.querySelector(".contents")

// The contents mark the section at the top of the window. They are beside the text if there is room.
if (contents) {
  const links = [...contents.querySelectorAll("a")], beside = matchMedia("(min-width: 1400px)")
  const sections = links.map(link => document.getElementById(link.hash.slice(1)).closest("section, form"))
  const follow = () => {
    const at = sections.findLastIndex(section => section.getBoundingClientRect().top < innerHeight / 3)
    links.forEach((link, n) => n === at ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current"))
    if (contents.open && beside.matches) links[at]?.scrollIntoView({ block: "nearest" })
  }
  const place = () => contents.open = beside.matches
  beside.addEventListener("change", place)
  contents.addEventListener("click", event => event.target.matches("a") && !beside.matches && (contents.open = false))
  addEventListener("scroll", follow, { passive: true })
  place()
  follow()
}

// A picture: shows the state that its slider selects. Of boxes, it shows those present and the chosen one's note.
for (const form of document.forms) {
  const [says, stage, text, data] = form.querySelectorAll("p, .stage, output, script"), { moment, play } = form
  const frames = JSON.parse(data.textContent)
  const plain = value => String(value).replace(/[&<]/g, found => ({ "&": "&amp;", "<": "&lt;" })[found])
  let frame

  function chip(part, old) {
    if (!Array.isArray(part)) return `<span class=word>${plain(part)}</span>`
    const changed = old !== undefined && old !== JSON.stringify(part) ? " changed" : ""
    return `<span class="chip ${part[2]}${changed}" style="--c: var(--c${part[1]})">${plain(part[0])}</span>`
  }
  function tellTable() {
    const { states, columns, curve } = frame, n = +moment.value, [said, rows] = states[n]
    const before = n ? states[n - 1][1] : {}
    const body = Object.entries(rows).map(([name, row]) => `<tr><th scope=row>${plain(name)}</th>` + row.map((cell, k) => {
      const old = before[name]?.[k]?.map(part => JSON.stringify(part)) ?? []
      const span = row.length === 1 ? ` colspan=${columns.length}` : ""
      return `<td${span}>${cell.map((part, i) => chip(part, n ? old[i] ?? "" : undefined)).join("")}</td>`
    }).join("") + "</tr>").join("")
    const head = columns.map(name => `<th scope=col>${plain(name)}</th>`).join("")
    stage.innerHTML = `<table><tr><td></td>${head}</tr>${body}</table>` + skyline(curve, n)
    says.textContent = said
    stage.style.minHeight = stage.offsetHeight + "px"  // so that the content below does not move
  }
  function skyline(curve, at) {
    const kinds = Object.entries(curve)
    if (!kinds.length) return ""
    const sums = kinds[0][1].map((_, n) => kinds.reduce((sum, [, row]) => sum + row[n], 0)), most = Math.max(...sums)
    const bars = sums.map((_, n) => {
      let y = 0
      return kinds.map(([, row], k) => `<rect x="${n}.05" width=".9" y="${1 - (y += row[n] / most)}" fill="var(--c${k})"
        height="${row[n] / most}" opacity="${n === at ? 1 : .45}"/>`).join("")
    }).join("")
    const legend = kinds.map(([kind, row], k) => chip([`${kind} ${(row[at] / 1024).toFixed(1)} KiB`, k, ""])).join("")
    return `<svg class=skyline viewBox="0 0 ${sums.length} 1" preserveAspectRatio=none role=img
      aria-label="bytes over the states">${bars}</svg><div class=legend>${legend}
      <span class=word>together ${(sums[at] / 1024).toFixed(1)} KiB</span></div>`
  }
  function tellBoxes() {
    const chosen = frame.boxes[stage.querySelector(":checked")?.value]
    stage.style.setProperty("--moment", moment.value)
    says.textContent = [frame.moments[moment.value], chosen?.[5]].filter(Boolean).join("\n")
  }
  const tell = () => frame.states ? tellTable() : tellBoxes()

  function draw() {
    frame = frames[Array.from(form.querySelectorAll("select"), select => select.value).join("/")]
    text.textContent = frame.text
    const last = (frame.states ?? frame.moments).length - 1
    stage.style = ""
    stage.className = frame.states ? "stage" : "stage grid"
    if (!frame.states) {
      const rows = frame.rows.map((name, y) => `<span style="grid-row: ${y + 1}">${name}</span>`)
      const boxes = frame.boxes.map(([y, x, width, colour, label, , since], n) => `<label style="--since: ${since};
        --c: var(--c${colour}); grid-area: ${y + 1} / ${x + 2} / auto / span ${width}"><input
        type=radio name=box value=${n}> ${label}</label>`)
      stage.style = `--rows: ${rows.length}; --columns: ${frame.width}`
      stage.innerHTML = [...rows, ...boxes].join("")
    }
    moment.max = last
    moment.value = frame.states ? Math.round(last * .6) : last
    moment.disabled = play.disabled = !last
    tell()
  }
  form.addEventListener("submit", event => event.preventDefault())
  form.addEventListener("input", event => event.target.matches("select") ? draw() : tell())
  stage.addEventListener("mouseover", event => event.target.control?.click())
  setInterval(() => {
    if (!play.checked) return
    moment.value = (+moment.value + 1) % (+moment.max + 1)
    tell()
  }, 700)
  draw()
}
