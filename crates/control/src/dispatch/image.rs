//! Requests about images, conversions and salvage, with or without a datastore.

use super::Watch;
use crate::message::{ImageRequest, Reply, Request};
use disk::salvage::SalvageRequest;
use disk::{Datastore, Progress, images};
use error::Result;

/// Carries out a request that needs no datastore.
pub fn alone(request: Request, watch: &dyn Watch) -> Result<Reply> {
    match request {
        Request::Image(request) => dispatch(request, watch),
        Request::Convert(conversion) => convert(None, &conversion, watch),
        Request::Salvage(request) => salvage(&request, watch),
        _ => Err(super::needs_datastore()),
    }
}

/// Carries out a request about images.
pub fn dispatch(request: ImageRequest, watch: &dyn Watch) -> Result<Reply> {
    let progress: &dyn Progress = watch;
    Ok(match request {
        ImageRequest::Show { path, options } => Reply::Image(images::show(&path, &options)?),
        ImageRequest::Check { path, repair, options } => {
            Reply::ImageCheck(images::check(&path, &options, repair, progress)?)
        }
        ImageRequest::Create { new, options } => {
            Reply::ImageCreated(Box::new(images::create(&new, &options, progress)?))
        }
    })
}

/// Extracts disks from a datastore that cannot be opened.
pub fn salvage(request: &SalvageRequest, watch: &dyn Watch) -> Result<Reply> {
    let progress: &dyn Progress = watch;
    Ok(match &request.extract {
        None => Reply::SalvageList(Box::new(request.list(progress)?)),
        Some(extract) => Reply::Salvaged(Box::new(request.extract(extract, progress)?)),
    })
}

/// Carries out a conversion.
pub fn convert(
    datastore: Option<&Datastore>,
    conversion: &disk::convert::Conversion,
    watch: &dyn Watch,
) -> Result<Reply> {
    let progress: &dyn Progress = watch;
    Ok(Reply::Converted(conversion.run(datastore, progress)?))
}
