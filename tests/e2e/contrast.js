// The smallest contrast of visible texts with what is painted behind them, by WCAG 2.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = css => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => [.2126, .7152, .0722].reduce((sum, part, i) => sum + part * linear(c[i] / 255), 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const found = rgba(getComputedStyle(node).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  let worst = [99];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !node.checkVisibility() || node.closest("noscript, dialog:not([open]), .unseen, .skip")) continue;
    const style = getComputedStyle(node);
    const ink = rgba(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < worst[0]) worst = [ratio, node.getAttribute("class"), node.textContent.slice(0, 40)];
  }
  return worst;
})()
