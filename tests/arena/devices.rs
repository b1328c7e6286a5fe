//! Opening devices: several at once, choice of the driver, missing or incomplete libraries.

use std::process::Command;
use std::sync::Arc;

use vmmgraph::driver::{CudaDriver, HostDriver};
use vmmgraph::{Device, DriverChoice, Error, HostOptions, Options, SharedVmmAllocator, Stream};
use vmmgraph_testkit::{MIB, alone, child};

fn in_a_child(test: &str, surroundings: &[(&str, &str)]) -> String {
    let mut child = child!(test);
    child.env("VMMGRAPH_TEST_CHILD", "1").env_remove("VMMGRAPH_DRIVER");
    for (name, value) in surroundings {
        child.env(name, value);
    }
    let output = child.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    text
}

fn is_child() -> bool {
    std::env::var_os("VMMGRAPH_TEST_CHILD").is_some()
}

#[test]
fn two_gpus_have_memory_of_their_own() {
    let _alone = alone();
    let devices = [0, 1].map(|ordinal| Device::with_driver(Arc::new(CudaDriver::new(ordinal).unwrap())));
    let arenas =
        devices.each_ref().map(|device| SharedVmmAllocator::new(device, &Options::default()).unwrap());
    for (index, arena) in arenas.iter().enumerate() {
        let space = arena.open_space().unwrap();
        let bytes = (index as u64 + 1) * 32 * MIB;
        let block = space.allocate(bytes, Stream::LEGACY).unwrap();
        let driver = devices[index].driver();
        // SAFETY: a live block.
        unsafe { driver.fill(block, bytes, 0xabcd_0000 + index as u32, Stream::LEGACY) }.unwrap();
        let mut word = [0; 4];
        // SAFETY: as above.
        unsafe { driver.read(block.plus(bytes - 4), &mut word) }.unwrap();
        assert_eq!(u32::from_ne_bytes(word), 0xabcd_0000 + index as u32);
        assert_eq!(devices[index].stats().physical_bytes, bytes);
        assert_eq!(driver.info().ordinal, index as i32);
        assert_eq!(arenas[1 - index].current_offset(), 0);
        assert_eq!(driver.free_bytes().unwrap(), driver.info().total_bytes - bytes);
    }
    for ordinal in [-1, 2] {
        let refused = CudaDriver::new(ordinal).map(drop);
        assert_eq!(refused, Err(Error::InvalidDevice { driver: "cuda", ordinal, count: 2 }));
    }
}

#[test]
fn a_device_is_opened_once_in_a_process_and_again_after_its_last_user() {
    let small = HostOptions { memory_bytes: 64 * MIB, ..HostOptions::default() };
    let first = Device::open(DriverChoice::HOST, 5, small).unwrap();
    assert!(Arc::ptr_eq(&first, &Device::open(DriverChoice::HOST, 5, small).unwrap()));
    let refused = Device::open(DriverChoice::HOST, 5, HostOptions::default()).map(drop);
    assert_eq!(refused, Err(Error::DeviceInUse { driver: "host", ordinal: 5 }));
    drop(first);
    let again = Device::open(DriverChoice::HOST, 5, HostOptions::default()).unwrap();
    assert!(again.driver().info().total_bytes > 64 * MIB);
    assert!(HostDriver::new(8, small).is_err() && HostDriver::new(-1, small).is_err());
}

fn chosen() -> String {
    match Device::open(DriverChoice::Auto, 0, HostOptions::default()) {
        Ok(device) => format!("{} driver", device.driver().info().platform),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_surroundings_choose_the_driver() {
    if is_child() {
        println!("chosen: {}; cuda: {:?}", chosen(), CudaDriver::new(0).map(drop));
        return;
    }
    let child =
        |surroundings: &[(&str, &str)]| in_a_child("the_surroundings_choose_the_driver", surroundings);
    assert!(child(&[]).contains("chosen: cuda driver; cuda: Ok(())"));
    assert!(child(&[("VMMGRAPH_DRIVER", "host")]).contains("chosen: host driver"));
    let none = child(&[("STANDIN_CUDA_DEVICES", "0")]);
    let refused = "chosen: cannot open device 0: no platform has a usable device (cuda: the driver has no device; hip: ";
    assert!(none.contains(refused) && none.contains("InvalidDevice"), "{none}");
    assert!(none.contains("set VMMGRAPH_DRIVER=host"), "{none}");
    let asked = child(&[("STANDIN_CUDA_DEVICES", "0"), ("VMMGRAPH_DRIVER", "cuda")]);
    assert!(asked.contains("chosen: device 0: the cuda driver has 0 device(s)"), "{asked}");
    assert!(child(&[("VMMGRAPH_DRIVER", "gpu")]).contains("cannot open a device of platform \"gpu\""));
}

#[test]
fn a_library_that_is_missing_or_lacks_a_function_is_an_error() {
    if is_child() {
        println!("chosen: {}; cuda: {:?}", chosen(), CudaDriver::new(0).map(drop));
        return;
    }
    let folder = std::env::temp_dir().join(format!("vmmgraph-devices-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let test = "a_library_that_is_missing_or_lacks_a_function_is_an_error";
    let library_path = folder.to_str().unwrap();

    let missing = in_a_child(test, &[("LD_LIBRARY_PATH", library_path)]);
    if missing.contains("cuda: Err") {
        assert!(missing.contains("; cuda: Err(DriverMissing {"), "{missing}");
        let refused = "chosen: cannot open device 0: no platform has a usable device (cuda: the cuda driver's library is not there (tried ";
        assert!(missing.contains(refused), "{missing}");
    } else {
        println!("SKIPPED: this machine has a CUDA driver");
    }

    let empty = Command::new("cc")
        .args(["-shared", "-x", "c", "/dev/null", "-o"])
        .arg(folder.join("libcuda.so"))
        .status();
    assert!(empty.is_ok_and(|status| status.success()), "the linker that cargo uses is called cc");
    let lacking = in_a_child(test, &[("LD_LIBRARY_PATH", library_path)]);
    assert!(
        lacking.contains("(cuda: the cuda driver's library has no cuInit: a newer driver is needed; "),
        "{lacking}"
    );
    assert!(lacking.contains("cuda: Err(SymbolMissing { driver: \"cuda\", name: \"cuInit\" })"), "{lacking}");
    std::fs::remove_dir_all(&folder).unwrap();
}
