// Runs behind MemoryViz.js, in its own scope: shows a snapshot in every view, and says what is drawn and what is told under the pointer.
const found = {errors, views: {}};
const select = [...document.querySelectorAll('select')].find(each => [...each.options].some(option => option.text === 'Allocator State History'));

function over(element) {
  element.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
  return [...document.querySelectorAll('pre')].map(each => each.textContent).filter(text => text.includes('allocation')).join('\n');
}

add_local_files([{name: 'snapshot', base64: SNAPSHOT}], 'Active Memory Timeline');
const names = [...select.options].map(option => option.text).filter(name => /Timeline|History/.test(name));
let at = 0;
function next() {
  const shown = [...document.querySelectorAll('body > div')].filter(each => each.style.display !== 'none' && each.querySelector('svg'));
  const view = shown[0];
  if (view !== undefined && at > 0) {
    const polygons = view.querySelectorAll('svg polygon');
    const segments = view.querySelectorAll('rect[stroke=black]');
    found.views[names[at - 1]] = {
      polygons: polygons.length,
      segments: segments.length,
      blocks: view.querySelectorAll('rect').length,
      events: view.querySelectorAll('pre').length,
      told: over(polygons[0] ?? segments[0]),
    };
  }
  if (at === names.length) {
    document.body.textContent = `PROBE[${btoa(unescape(encodeURIComponent(JSON.stringify(found))))}]PROBE`;
    return;
  }
  select.value = names[at++];
  select.dispatchEvent(new Event('change'));
  setTimeout(next, 500);
}
setTimeout(next, 500);
