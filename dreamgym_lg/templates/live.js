// Shows what a run stores while the page is open. Without this script a page is whole, and a reload does the same.
const status = document.querySelector(".live");
let shown = document.body.dataset.stamp;

async function read(address) {
  const answer = await fetch(address);
  return answer.text();
}

async function look() {
  if (document.hidden) return;
  const stamp = await read("/stamp");
  if (stamp !== shown) {
    const page = new DOMParser().parseFromString(await read(location.href), "text/html");
    const [before, after] = [document.querySelector("main"), page.querySelector("main")];
    const open = new Set([...before.querySelectorAll("details[open]")].map((each) => each.id));
    for (const each of after.querySelectorAll("details")) each.open = open.has(each.id);
    if (before.outerHTML !== after.outerHTML) before.replaceWith(after);
    shown = stamp;
  }
  status.textContent = "live";
}

setInterval(() => look().catch(() => (status.textContent = "not live: nothing answers")), 2000);
