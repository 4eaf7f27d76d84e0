//! A kernel that writes to an illegal address on purpose.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use vramq_inference::device::Device as _;
use vramq_inference::device::cuda::CudaDevice;

/// Writes to an address that is nobody's.
const PTX: &str = "
.version 6.4
.target sm_75
.address_size 64
.visible .entry crash() {
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 256;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
";

/// Runs it, and says by which error the device was lost.
pub fn crash(device: &Arc<CudaDevice>) -> Result<()> {
    let function = device.load_module(PTX.into())?.function("crash")?;
    // SAFETY: the kernel takes no parameters. What it does is undefined for the device's context only, which this process uses
    // no more.
    let launched = unsafe { device.launch(function.handle(), (1, 1), 1, &mut []) };
    let ended = launched.and_then(|()| device.synchronize());
    let Err(error) = ended else { bail!("the kernel ended well") };
    let lost = device.lost();
    ensure!(lost.as_ref().is_some_and(|loss| !loss.is_late), "{error}, and the device counts as {lost:?}");
    let again = device.alloc(1 << 20).err();
    ensure!(again == Some(error), "{error}, and then {again:?}");
    println!("{error}");
    Ok(())
}
