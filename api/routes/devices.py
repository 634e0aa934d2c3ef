"""What can be tuned for."""

from fastapi import APIRouter

from api.deps import Db
from api.openapi import errors
from api.services import devices
from api.strict import StrictRoute
from api.views.devices import DeviceList

router = APIRouter(prefix="/v1/devices", tags=["devices"], route_class=StrictRoute)


@router.get("", responses=errors(), summary="Devices and profiles")
def listing(db: Db) -> DeviceList:
    """GPUs that a tuner has announced, and the GPU models that mode `model` can estimate without one."""
    with db.read() as session:
        return devices.listing(session)
