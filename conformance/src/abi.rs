//! A platform's declarations as C that its vendor's header has to agree with.

use std::fmt::Write;

use vmmgraph::driver::abi::Abi;

/// A C file that compiles, optimised, where a vendor's header says what the library assumes of it: the prototype of every function, the size and the
/// offsets of every structure, the value of every constant. A function that the library can do without is left out with
/// `-DWITHOUT_name`, for headers older than it.
#[must_use]
pub fn assertions(abi: &Abi) -> String {
    let mut text = format!("/* What VmmGraph assumes of the platform {}. */\n", abi.platform);
    text += "#include <stddef.h>\n#include <stdint.h>\n";
    text += abi.preamble.trim_end();
    text += "\n\n";
    // Writing to a String cannot fail.
    for function in &abi.functions {
        let (name, pointer) = (function.name, function.pointer());
        let assertion = format!(
            "_Static_assert(__builtin_types_compatible_p(__typeof__(&{name}), {pointer}), \"the prototype of {name}\");"
        );
        let _ = if function.optional {
            writeln!(text, "#ifndef WITHOUT_{name}\n{assertion}\n#endif")
        } else {
            writeln!(text, "{assertion}")
        };
    }
    for layout in &abi.structs {
        let (name, bytes) = (layout.name, layout.bytes);
        let _ = writeln!(text, "_Static_assert(sizeof({name}) == {bytes}, \"the size of {name}\");");
        for (member, offset) in &layout.members {
            let _ = writeln!(
                text,
                "_Static_assert(offsetof({name}, {member}) == {offset}, \"the offset of {member} in {name}\");"
            );
        }
    }
    for constant in &abi.constants {
        let (name, value) = (constant.name, constant.value);
        // Some headers have constant objects, which are no constant expressions in C: an optimiser knows their values all the same.
        let _ = writeln!(
            text,
            "extern void differs_{name}(void) __attribute__((error(\"the value of {name}\")));\nvoid look_at_{name}(void) \
             {{ if ((long long)({name}) != {value}LL) differs_{name}(); }}"
        );
    }
    text
}
