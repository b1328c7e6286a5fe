//! The suite on the stand-in of every platform, through the driver that a real device would have.

use vmmgraph::HostOptions;
use vmmgraph::driver::SharedDriver;
use vmmgraph::driver::platform::PLATFORMS;
use vmmgraph_conformance::captures::Captures;
use vmmgraph_conformance::{Outcome, Plug, Subject, run};

/// What a platform does not offer.
type NotOffered = &'static [&'static str];

/// One line a platform.
const STAND_INS: &[(&str, NotOffered)] = &[("cuda", &["unmap-waits"])];

#[test]
fn every_stand_in_passes_what_its_driver_offers() {
    for (name, not_offered) in STAND_INS {
        let platform = PLATFORMS.iter().find(|platform| platform.name == *name).unwrap();
        let open = |ordinal| -> SharedDriver { (platform.open)(ordinal, HostOptions::default()).unwrap() };
        let captures = Captures::of(name).unwrap();
        let plug: Option<&dyn Plug> = Some(&captures);
        let report = run(&Subject { driver: open(0), other: Some(open(1)), plug });
        println!("{report}");
        assert_eq!(report.names(Outcome::Failed), [""; 0], "{name}");
        assert_eq!(report.names(Outcome::NotOffered), *not_offered, "{name}");
    }
}
