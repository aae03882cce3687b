// The map as it stands on the page, between its title and its scale, as a PNG file. Lengths are CSS pixels.
const SPACE = 30, // above and below the map
  INDENT = 64, // of the scale: the names of the rows stand there
  RAMP = 160, // the width of the scale's colours
  GAP = 6; // between these and their ends

function saveMapPicture(file, stops) {
  const map = at("map"),
    ratio = map.width / map.getBoundingClientRect().width,
    [least, most, kind] = [".least", ".most", ".kind"].map((part) => at("map-scale").querySelector(part).textContent),
    ends = `${most}  ${kind}`,
    made = element("canvas"),
    pen = made.getContext("2d"),
    small = "11px system-ui, sans-serif";
  pen.font = small;
  const start = INDENT + pen.measureText(least).width + GAP,
    wide = start + RAMP + 2 * GAP + pen.measureText(ends).width;
  made.width = Math.max(map.width, Math.ceil(wide * ratio)); // which clears the canvas and its font
  made.height = map.height + Math.round(2 * SPACE * ratio);
  pen.fillStyle = css("--ground");
  pen.fillRect(0, 0, made.width, made.height);
  pen.drawImage(map, 0, Math.round(SPACE * ratio));
  pen.scale(ratio, ratio);
  pen.fillStyle = css("--ink");
  pen.textBaseline = "middle";
  pen.font = "bold 14px system-ui, sans-serif";
  pen.fillText(at("name").textContent, 4, SPACE / 2);
  const y = made.height / ratio - SPACE / 2,
    ramp = pen.createLinearGradient(start, 0, start + RAMP, 0);
  pen.font = small;
  pen.fillText(least, INDENT, y);
  pen.fillText(ends, start + RAMP + GAP, y);
  stops.forEach((stop, n) => ramp.addColorStop(n / (stops.length - 1), stop));
  pen.fillStyle = ramp;
  pen.fillRect(start, y - 5, RAMP, 10);
  made.toBlob((blob) => saveFile(file, blob, "image/png"));
}
