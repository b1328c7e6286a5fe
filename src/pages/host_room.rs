//! Available memory of the machine: a request for more is refused before the kernel kills the
//! process.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result};

/// Left to the rest of the machine; on small machines, a sixteenth of the available memory.
const RESERVE: u64 = 1 << 30;

/// `held`: bytes already held by the caller, for the message.
pub(crate) fn check_host_room(requested: u64, held: u64) -> Result<()> {
    match available() {
        Some(available) if requested > available => {
            Err(Error::OutOfHostMemory { requested, held, limit: 0, available: Some(available) })
        }
        _ => Ok(()),
    }
}

/// Available bytes: the minimum of the machine and its control groups (v2), less the reserve.
fn available() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| kib_of(&text, "MemAvailable:"))?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("");
    let group = Path::new("/sys/fs/cgroup").join(group);
    let within = group.ancestors().take_while(|path| path.starts_with("/sys/fs/cgroup"));
    let left = within.filter_map(left_in_group).fold(machine, u64::min);
    Some(left - (left / 16).min(RESERVE))
}

fn kib_of(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Inactive file cache counts as free, as the kernel drops it first.
fn left_in_group(group: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok());
    Some(limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_machine_has_is_refused_with_both_numbers() {
        let refused = check_host_room(1 << 46, 5);
        let Err(Error::OutOfHostMemory { requested, held: 5, limit: 0, available: Some(left) }) = refused
        else {
            panic!("{refused:?}")
        };
        assert!(requested == 1 << 46 && left > 0 && left < requested);
        assert_eq!(check_host_room(4096, 0), Ok(()));
    }

    #[test]
    fn kernel_files_are_read_as_bytes_and_anything_else_is_no_number() {
        let text = "MemTotal:       24684084 kB\nMemAvailable:      12 kB\nHugePages_Total:       3\n";
        assert_eq!(kib_of(text, "MemAvailable:"), Some(12 * 1024));
        assert_eq!((kib_of(text, "HugePages_Total:"), kib_of("", "MemAvailable:")), (None, None));
        let group = std::env::temp_dir().join(format!("vmmgraph-group-{}", std::process::id()));
        fs::create_dir_all(&group).unwrap();
        let write = |name: &str, text: &str| fs::write(group.join(name), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "600\n");
        assert_eq!(left_in_group(&group), None);
        write("memory.max", "1000\n");
        assert_eq!(left_in_group(&group), Some(400));
        write("memory.stat", "anon 300\ninactive_file 250\nactive_file 50\n");
        assert_eq!(left_in_group(&group), Some(650));
        fs::remove_dir_all(&group).unwrap();
    }
}
