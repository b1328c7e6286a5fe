//! Checks a platform's declarations against its vendor's header, as C assertions.

use std::fmt::Write;

use vmmgraph::driver::abi::Abi;

/// Returns a C file that compiles, optimised, if the vendor's header agrees with the library's
/// declarations: prototypes, sizes, offsets and constants. `-DWITHOUT_name` skips an optional
/// function, for older headers.
#[must_use]
pub fn assertions(abi: &Abi) -> String {
    let mut text = format!("/* What VmmGraph assumes of the platform {}. */\n", abi.platform);
    text += "#include <stddef.h>\n#include <stdint.h>\n";
    text += abi.preamble.trim_end();
    text += "\n\n";
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
        // Some headers define constants as objects, which are not constant expressions in C. An
        // optimiser knows their values.
        let _ = writeln!(
            text,
            "extern void differs_{name}(void) __attribute__((error(\"the value of {name}\")));\nvoid look_at_{name}(void) \
             {{ if ((long long)({name}) != {value}LL) differs_{name}(); }}"
        );
    }
    text
}
