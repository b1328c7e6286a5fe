//! Handles: generational keys of one process-wide table, cast to pointers and never dereferenced. A
//! destroyed, foreign or invented handle is an error and not undefined behaviour.

use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use slotmap::{DefaultKey, Key, KeyData, SlotMap};

use super::account::Budget;
use super::guard::Failure;
use super::inputs::PlannedInputs;
use super::lease::Vacating;
use super::memory::Observer;
use super::pause_hooks::Hooks;
use super::ready::Shared as Ready;
use super::reclaimer::Asked;
use super::status::VMMGRAPH_ERROR_INVALID_HANDLE;
use crate::dispatch::Dispatcher;
use crate::error::Error;
use crate::policy::{Grants, HostKv, Lengths, PreCommit, SloControl, Standing};
use crate::sync::Mutex;
use crate::{
    BlockPool, Device, ElasticBuffer, HostBuffer, KvCache, Lease, PeerMap, PeerPage, Pending, Region, Ring,
    RingGraph, SharedVmmAllocator, Space,
};

enum Object {
    Device(Arc<Device>),
    Account(Arc<Budget>),
    Arena(Arc<SharedVmmAllocator>),
    Space(Arc<Space>),
    Dispatcher(Arc<Dispatcher>),
    Inputs(Arc<PlannedInputs>),
    Region(Arc<Region>),
    Hooks(Arc<Hooks>),
    Ready(Arc<Ready>),
    Elastic(Arc<ElasticBuffer>),
    Cache(Arc<KvCache>),
    Pending(Arc<Pending>),
    Observer(Arc<Observer>),
    Asked(Arc<Asked>),
    Lease(Arc<Lease>),
    Vacating(Arc<Vacating>),
    Pool(Arc<Mutex<BlockPool>>),
    PreCommit(Arc<Mutex<PreCommit>>),
    Standing(Arc<Mutex<Standing>>),
    Grants(Arc<Mutex<Grants>>),
    Lengths(Arc<Mutex<Lengths>>),
    HostKv(Arc<Mutex<HostKv>>),
    SloControl(Arc<Mutex<SloControl>>),
    Ring(Arc<Ring>),
    RingGraph(Arc<RingGraph>),
    HostBuffer(Arc<HostBuffer>),
    PeerPage(Arc<PeerPage>),
    PeerMap(Arc<PeerMap>),
}

pub(super) trait Handled: Sized {
    const NAME: &'static str;
    fn wrap(object: Arc<Self>) -> ObjectBox;
    fn unwrap(object: &ObjectBox) -> Option<&Arc<Self>>;
}

pub(super) struct ObjectBox(Object);

macro_rules! handled {
    ($($kind:ident: $type:ty, $name:literal;)*) => {$(
        impl Handled for $type {
            const NAME: &'static str = $name;
            fn wrap(object: Arc<Self>) -> ObjectBox {
                ObjectBox(Object::$kind(object))
            }
            fn unwrap(object: &ObjectBox) -> Option<&Arc<Self>> {
                match &object.0 {
                    Object::$kind(object) => Some(object),
                    _ => None,
                }
            }
        }
    )*};
}

handled! {
    Device: Device, "a device handle";
    Account: Budget, "an account handle";
    Arena: SharedVmmAllocator, "an arena handle";
    Space: Space, "a space handle";
    Dispatcher: Dispatcher, "a dispatcher handle";
    Inputs: PlannedInputs, "an input plan handle";
    Region: Region, "a region handle";
    Hooks: Hooks, "a pause hooks handle";
    Ready: Ready, "a handle of contents on their way";
    Elastic: ElasticBuffer, "an elastic buffer handle";
    Cache: KvCache, "a KV cache handle";
    Pending: Pending, "a pending commit's handle";
    Observer: Observer, "an elastic observer handle";
    Asked: Asked, "a reclaimer handle";
    Lease: Lease, "a lease handle";
    Vacating: Vacating, "a handle of a recall under way";
    Pool: Mutex<BlockPool>, "a block pool handle";
    PreCommit: Mutex<PreCommit>, "a pre-commit handle";
    Standing: Mutex<Standing>, "a handle of what stays";
    Grants: Mutex<Grants>, "a handle of grants";
    Lengths: Mutex<Lengths>, "a handle of lengths";
    HostKv: Mutex<HostKv>, "a handle of KV on the host";
    SloControl: Mutex<SloControl>, "a service level control's handle";
    Ring: Ring, "a ring handle";
    RingGraph: RingGraph, "a handle of a captured step";
    HostBuffer: HostBuffer, "a host buffer handle";
    PeerPage: PeerPage, "a handle of another process's page";
    PeerMap: PeerMap, "a handle of another process's range";
}

type Table = RwLock<SlotMap<DefaultKey, ObjectBox>>;

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(Table::default)
}

/// The null key for an impossible value.
fn key<P>(handle: *mut P) -> DefaultKey {
    let data = KeyData::from_ffi(handle as u64);
    // `from_ffi` rounds an invalid number to a valid key.
    if data.as_ffi() == handle as u64 { data.into() } else { DefaultKey::null() }
}

fn dead<T: Handled, P>(handle: *mut P) -> Error {
    let expected = "a live handle of this kind, not a null, moved-from or destroyed one";
    Error::InvalidArgument { what: T::NAME, value: handle as u64 as i128, expected }
}

fn refuse<T: Handled, P>(handle: *mut P) -> Failure {
    Failure::Status(VMMGRAPH_ERROR_INVALID_HANDLE, dead::<T, P>(handle))
}

pub(super) fn register<T: Handled, P>(object: Arc<T>) -> *mut P {
    table().write().insert(T::wrap(object)).data().as_ffi() as *mut P
}

pub(super) fn get<T: Handled, P>(handle: *mut P) -> Result<Arc<T>, Failure> {
    let table = table().read();
    table.get(key(handle)).and_then(T::unwrap).cloned().ok_or_else(|| refuse::<T, P>(handle))
}

/// The caller drops the object outside the table's lock.
pub(super) fn remove<T: Handled, P>(handle: *mut P) -> Result<Arc<T>, Failure> {
    let mut table = table().write();
    let object = table.get(key(handle)).and_then(T::unwrap).cloned().ok_or_else(|| refuse::<T, P>(handle))?;
    table.remove(key(handle));
    Ok(object)
}

/// Returns the space of a handle, for the bridge.
pub fn space_of(space: super::vmmgraph_space_t) -> crate::error::Result<Arc<Space>> {
    object_of(space)
}

/// Returns the arena of a handle, for the bridge.
pub fn arena_of(arena: super::vmmgraph_arena_t) -> crate::error::Result<Arc<SharedVmmAllocator>> {
    object_of(arena)
}

/// Returns the region of a handle, for the bridge.
pub fn region_of(region: super::vmmgraph_region_t) -> crate::error::Result<Arc<Region>> {
    object_of(region)
}

fn object_of<T: Handled, P>(handle: *mut P) -> crate::error::Result<Arc<T>> {
    get(handle).map_err(|_| dead::<T, P>(handle))
}
