//! The suite on the stand-in of every platform, through the driver that a real device would have.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vmmgraph::HostOptions;
use vmmgraph::driver::SharedDriver;
use vmmgraph::driver::platform::PLATFORMS;
use vmmgraph_conformance::captures::Captures;
use vmmgraph_conformance::{Outcome, Plug, Subject, run};

/// A platform, the file of its stand-in, and the cases that its driver does not offer.
type Row = (&'static str, &'static str, &'static [&'static str]);

/// One line a platform.
const STAND_INS: &[Row] = &[
    ("cuda", "libcuda.so", &["unmap-waits"]),
    ("hip", "libstandin_hip.so", &["replay-after-replace", "graph-executables"]),
];

#[test]
fn every_stand_in_passes_what_its_driver_offers() {
    for (name, file, not_offered) in STAND_INS {
        // Drivers take what the process has loaded.
        // SAFETY: a stand-in, which runs nothing when it is loaded; it stays.
        let library = unsafe { Library::open(Some(*file), RTLD_NOW | RTLD_LOCAL) };
        std::mem::forget(library.unwrap_or_else(|error| panic!("{file}: {error}")));
        let platform = PLATFORMS.iter().find(|platform| platform.name == *name).unwrap();
        let open = |ordinal| -> SharedDriver { (platform.open)(ordinal, HostOptions::default()).unwrap() };
        let captures = Captures::of(name).unwrap_or_else(|| panic!("no captures of {name}"));
        let plug: Option<&dyn Plug> = Some(&captures);
        let report = run(&Subject { driver: open(0), other: Some(open(1)), plug });
        println!("{report}");
        assert_eq!(report.names(Outcome::Failed), [""; 0], "{name}");
        assert_eq!(report.names(Outcome::NotOffered), *not_offered, "{name}");
    }
}
